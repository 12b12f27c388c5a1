//! `<portolan/thread.h>`: converts between numbers, function pointers and `errno`, and
//! `portolan::extension::thread`. These symbols are this library's own, not libc's.

use std::ffi::{CStr, c_char, c_void};
use std::slice;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use libc::{c_int, sockaddr, socklen_t};
use portolan::extension::Port;
use portolan::extension::thread::{Chain, Datagram, Threaded, Verdict};
use portolan::posix;
use rustix::io::Errno;

use crate::address::{self, Encoded};
use crate::own::{Fault, Numbered};

/// Minimum size of a handler's payload buffer.
const ROOM: usize = 2048;

/// Within this time a thread that waits for a datagram notices that it was stopped.
const LOOK_UP: Duration = Duration::from_millis(100);

/// `struct portolan_datagram`
#[repr(C)]
pub(crate) struct DatagramView {
    payload: *mut u8,
    length: usize,
    room: usize,
    from: *const c_void,
    from_length: socklen_t,
    reserved: u32,
}

type Call = unsafe extern "C-unwind" fn(*mut c_void, *mut DatagramView) -> c_int;

/// `struct portolan_thread_handler`
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct HandlerWish {
    name: *const c_char,
    call: Option<Call>,
    context: *mut c_void,
    priority: u32,
    reserved: u32,
}

/// A function of the program, and its context.
struct Handler {
    call: Call,
    context: *mut c_void,
}

// SAFETY: by the contract, the function may be called in another thread, with its context.
unsafe impl Send for Handler {}

/// `None` after it was stopped.
type ThreadCell = Mutex<Option<Threaded>>;

static THREADS: Numbered<ThreadCell> = Numbered::new();

own! {
    "thread.h", Fault;

    /// `int portolan_thread_start(int, const struct portolan_thread_handler *, size_t)`
    fn portolan_thread_start(socket: c_int, handlers: *const HandlerWish, count: usize) -> c_int {
        if handlers.is_null() || count == 0 {
            return Err(Errno::INVAL.into());
        }
        // SAFETY: by the contract there are `count`.
        let handlers = unsafe { slice::from_raw_parts(handlers, count) };
        let chain = handlers.iter().try_fold(Chain::default(), |chain, spec| {
            // SAFETY: by the contract.
            unsafe { spec.join(chain) }
        })?;
        let threaded = Port::of_socket(socket)?.handle_in_thread(chain)?;
        Ok(THREADS.enter(Mutex::new(Some(threaded)))?)
    }

    /// `ssize_t portolan_thread_recv(int, void *, size_t, struct sockaddr *, socklen_t *, int)`
    fn portolan_thread_recv(
        thread: c_int,
        payload: *mut c_void,
        size: usize,
        from: *mut sockaddr,
        from_length: *mut socklen_t,
        timeout_ms: c_int,
    ) -> isize {
        if payload.is_null() {
            return Err(Errno::FAULT.into());
        }
        address::check_room(from, from_length)?;
        let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
        let datagram = receive(thread, timeout)?;
        // SAFETY: by the contract there is room for `size` bytes.
        let room = unsafe { slice::from_raw_parts_mut(payload.cast::<u8>(), size) };
        let length = size.min(datagram.payload.len());
        room[..length].copy_from_slice(&datagram.payload[..length]);
        address::store_if_wanted(datagram.from, from, from_length)?;
        Ok(datagram.payload.len().cast_signed())
    }

    /// `int64_t portolan_thread_dropped(int)`
    fn portolan_thread_dropped(thread: c_int) -> i64 {
        let place = THREADS.find(thread)?;
        let threaded = lock(&place);
        let threaded = threaded.as_ref().ok_or(Errno::BADF)?;
        Ok(threaded.dropped().cast_signed())
    }

    /// `int portolan_thread_stop(int)`
    fn portolan_thread_stop(thread: c_int) -> c_int {
        let place = THREADS.take(thread)?;
        // A thread that waits for a datagram notices it soon.
        let stopped = lock(&place).take();
        drop(stopped);
        Ok(0)
    }
}

impl HandlerWish {
    /// # Safety
    /// `name` is null or a C string; the function may be called with the context in another thread.
    unsafe fn join(self, chain: Chain) -> Result<Chain, Errno> {
        let priority = u8::try_from(self.priority).map_err(|_| Errno::INVAL)?;
        let (Some(call), false, 0) = (self.call, self.name.is_null(), self.reserved) else {
            return Err(Errno::INVAL);
        };
        // SAFETY: the caller's promise.
        let name = unsafe { CStr::from_ptr(self.name) };
        let handler = Handler {
            call,
            context: self.context,
        };
        let name = name.to_str().map_err(|_| Errno::INVAL)?;
        Ok(chain.with_named(name, priority, move |datagram| handler.run(datagram)))
    }
}

impl Handler {
    fn run(&self, datagram: &mut Datagram) -> Verdict {
        let length = datagram.payload.len();
        let room = length.max(ROOM);
        datagram.payload.resize(room, 0);
        let from = datagram.from.map(Encoded::from);
        let from = from.as_ref().map_or(&[][..], Encoded::bytes);
        let mut view = DatagramView {
            payload: datagram.payload.as_mut_ptr(),
            length,
            room,
            from: from.as_ptr().cast(),
            from_length: from.len() as socklen_t,
            reserved: 0,
        };
        // SAFETY: the contract of `<portolan/thread.h>`; everything the view points to outlives the call.
        let verdict = unsafe { (self.call)(self.context, &raw mut view) };
        datagram.payload.truncate(view.length);
        match verdict {
            1 => Verdict::Consume,
            2 => Verdict::Reply,
            3 => Verdict::Deliver,
            _ => Verdict::Pass,
        }
    }
}

/// Waits in slices, between which another thread may stop the handlers' thread.
fn receive(thread: c_int, timeout: Option<Duration>) -> Result<Datagram, Errno> {
    let begun = Instant::now();
    loop {
        let left = timeout.map(|timeout| timeout.saturating_sub(begun.elapsed()));
        let place = THREADS.find(thread)?;
        let threaded = lock(&place);
        let wait = left.unwrap_or(LOOK_UP).min(LOOK_UP);
        let outside = posix::leave();
        let received = threaded.as_ref().ok_or(Errno::BADF)?.receive_within(wait);
        drop(outside);
        match received {
            Err(Errno::AGAIN) if left.is_none_or(|left| left > LOOK_UP) => {}
            done => return done,
        }
    }
}

fn lock(place: &ThreadCell) -> MutexGuard<'_, Option<Threaded>> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}
