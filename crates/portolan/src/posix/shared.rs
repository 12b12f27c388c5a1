//! Receiving and sending by shared buffers, without a copy between the program and the stack (MB §4.2).

use std::cell::RefCell;
use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::ops::Deref;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use portolan_sys::clock;
use portolan_sys::ring::Loan;
pub use portolan_tcp::Chunk;
use portolan_tcp::Connection;
pub(crate) use portolan_tcp::Placed;
use portolan_types::{Generation, Instant, Protocol, Slot};
use rustix::io::Errno;

use super::blocking::{Call, gone};
use super::data::{by_phase, send};
use super::find::{Transfer, find_to_use, retry_if_moved};
use crate::channel::layers::{self, Layer};
use crate::migration::active_open::complete_connect;
use crate::migration::registration;
use crate::outcome::Outcome;
use crate::process::{Process, inside};
use crate::runtime::Core;
use crate::runtime::lending::Returned;
use crate::socket::options::Options;
use crate::socket::{Socket, SocketPhase};

/// Bytes moved through shared buffers in this process.
static RECEIVED_IN_PLACE: AtomicU64 = AtomicU64::new(0);
static RECEIVED_COPIED: AtomicU64 = AtomicU64::new(0);
static SENT_IN_PLACE: AtomicU64 = AtomicU64::new(0);
static SENT_COPIED: AtomicU64 = AtomicU64::new(0);

/// The part of a receive buffer that may be returned without telling its session.
const NOTABLE_PART: usize = 4;

/// Bytes that this process has moved through shared buffers so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moved {
    /// Read by the program where the kernel put them.
    pub received_in_place: u64,
    /// Received, but copied.
    pub received_copied: u64,
    /// Passed to the device from where the program wrote them.
    pub sent_in_place: u64,
    /// Sent, but copied: less than 64 KiB at a time, or within the host.
    pub sent_copied: u64,
}

/// Returns what this process has moved so far. Neither the socket calls nor datagrams that are sent are counted.
///
/// ```no_run
/// let moved = portolan::net::buf::moved();
/// println!("{} bytes were not copied", moved.received_in_place + moved.sent_in_place);
/// ```
pub fn moved() -> Moved {
    let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
    Moved {
        received_in_place: read(&RECEIVED_IN_PLACE),
        received_copied: read(&RECEIVED_COPIED),
        sent_in_place: read(&SENT_IN_PLACE),
        sent_copied: read(&SENT_COPIED),
    }
}

fn count(counter: &AtomicU64, bytes: usize) {
    counter.fetch_add(bytes as u64, Ordering::Relaxed);
}

/// Received bytes, which the program keeps until this is dropped.
pub struct Piece {
    bytes: Bytes,
    /// Dropped after the bytes: the ring gets their space before the peer sees a larger window.
    _account: Option<Account>,
}

enum Bytes {
    Lent(Loan),
    Chunk(Chunk),
    Datagram(Vec<u8>),
}

impl Piece {
    /// Are the bytes where the kernel put them?
    pub fn is_in_place(&self) -> bool {
        matches!(&self.bytes, Bytes::Lent(loan) if loan.is_in_place())
    }

    /// Wraps bytes that were received from a kernel socket.
    pub(crate) fn of_chunk(chunk: Chunk) -> Piece {
        Piece::copied(Bytes::Chunk(chunk))
    }

    fn copied(bytes: Bytes) -> Piece {
        let piece = Piece {
            bytes,
            _account: None,
        };
        count(&RECEIVED_COPIED, piece.len());
        piece
    }

    fn lent(loan: Loan, account: Account) -> Piece {
        let counter = if loan.is_in_place() {
            &RECEIVED_IN_PLACE
        } else {
            &RECEIVED_COPIED
        };
        count(counter, loan.len());
        Piece {
            bytes: Bytes::Lent(loan),
            _account: Some(account),
        }
    }
}

impl fmt::Debug for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_in_place = self.is_in_place();
        write!(f, "Piece({} bytes, in place: {is_in_place})", self.len())
    }
}

impl Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Lent(loan) => loan,
            Bytes::Chunk(chunk) => chunk.bytes(),
            Bytes::Datagram(bytes) => bytes,
        }
    }
}

/// The window that lent bytes count against.
struct Account {
    process: &'static Process,
    session: Session,
    returned: Arc<Returned>,
    /// This many bytes are a part of the window that the session must know of.
    notable: usize,
    bytes: usize,
}

impl Drop for Account {
    fn drop(&mut self) {
        if self.returned.add(self.bytes) < self.notable {
            return;
        }
        // In a child of fork this is a copy, and the parent has the session.
        let is_here = Process::running().is_some_and(|here| std::ptr::eq(here, self.process));
        if !is_here {
            return;
        }
        let _inside = inside::enter();
        let mut core = self.process.lock();
        let (slot, generation) = self.session;
        let Some(found) = core.stack.tcp(slot) else {
            return;
        };
        if found.generation != generation {
            return;
        }
        found.connection.give_back(self.returned.take());
        if found.connection.has_output() {
            core.touch_after_read(slot);
            core.poll_tx(clock::now());
        }
    }
}

/// A session of packets, while it is here.
type Session = (Slot, Generation);

/// The result of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// Number of bytes; 0 at the end of a stream.
    pub length: usize,
    /// For a datagram.
    pub from: Option<SocketAddr>,
}

/// Receives pending data, or waits for the next, without a copy where possible. Adds at most `most`
/// pieces to `pieces`; one for a datagram.
pub fn receive_shared(fd: RawFd, most: usize, pieces: &mut Vec<Piece>) -> Outcome<Taken> {
    let _call = layers::enter(Layer::Call);
    retry_if_moved(|| {
        let (socket, process) = find_to_use(fd, || Transfer::Any)?;
        complete_connect(process, fd, &socket);
        match (socket.settled_phase(), socket.protocol) {
            (SocketPhase::Cached, Protocol::Tcp) => {
                take_stream(process, fd, &socket, (most, pieces))
            }
            (SocketPhase::Cached, Protocol::Udp) => take_datagram(process, &socket, pieces),
            _ => take_copy(process, fd, &socket, pieces),
        }
    })
}

/// Receives like `recv`, into memory of the library's.
fn take_copy(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    pieces: &mut Vec<Piece>,
) -> Outcome<Taken> {
    let mut chunk = Chunk::new();
    chunk.resize_unspecified(Chunk::CAPACITY);
    let mut buffers = [IoSliceMut::new(chunk.bytes_mut())];
    let received = by_phase(process, fd, socket, &mut buffers, 0)?;
    chunk.resize_unspecified(received.length);
    if received.length > 0 || received.from.is_some() {
        pieces.push(Piece::of_chunk(chunk));
    }
    Ok(Taken {
        length: received.length,
        from: received.from,
    })
}

fn take_stream(
    process: &'static Process,
    fd: RawFd,
    socket: &Arc<Socket>,
    (most, pieces): (usize, &mut Vec<Piece>),
) -> Outcome<Taken> {
    let call = Call {
        process,
        socket,
        flags: 0,
        timeout: Options::receive_timeout,
    };
    // Its frames come by its own row, which they can be lent by.
    registration::register(process, socket)?;
    let mut core = call.lock_to_receive()?;
    let slot = socket.slot();
    let of_packets = if core.is_local(slot) {
        None
    } else {
        core.stack.tcp(slot).map(|found| found.generation)
    };
    let Some(generation) = of_packets else {
        drop(core);
        return take_copy(process, fd, socket, pieces);
    };
    let session = (slot, generation);
    core.lending.begin(slot, generation);
    settle_returned(&mut core, slot);
    let attempt = |core: &mut Core, now: Instant| {
        let connection = match core.stack.tcp(slot) {
            Some(found) if found.generation == generation => &found.connection,
            _ => return Some(gone(socket)),
        };
        let has_some = connection.readable() > 0;
        let (has_read_end, has_ended) =
            (connection.has_read_end(), connection.is_receive_finished());
        if has_some || core.lending.has_some(slot) {
            return Some(Ok(take(core, now, session, (most, pieces))));
        }
        if has_read_end {
            return Some(Ok(0));
        }
        if let Some(errno) = core.take_error(socket) {
            return Some(Err(errno.into()));
        }
        has_ended.then_some(Ok(0))
    };
    let length = call.complete(core, attempt, || None)?;
    Ok(Taken { length, from: None })
}

/// Tells the session which bytes its program has returned since its last call.
fn settle_returned(core: &mut Core, slot: Slot) {
    let Core { lending, stack, .. } = core;
    if let (Some(returned), Some(session)) = (lending.returned(slot), stack.tcp(slot)) {
        session.connection.give_back(returned.take());
        if session.connection.has_output() {
            stack.touch_after_read(slot);
        }
    }
}

/// Takes pending data in the stream's order: the part of the receive queue that precedes the
/// retained payload, and the latter. Returns the number of bytes.
fn take(
    core: &mut Core,
    now: Instant,
    session: Session,
    (most, pieces): (usize, &mut Vec<Piece>),
) -> usize {
    let (slot, _) = session;
    let first = pieces.len();
    let (Some(process), Some(returned)) = (Process::running(), core.lending.returned(slot)) else {
        return 0;
    };
    let returned = Arc::clone(returned);
    let mut retained = core.lending.take(slot);
    let Some(found) = core.stack.tcp(slot) else {
        return 0;
    };
    let connection = &mut found.connection;
    let unread = if retained.is_empty() {
        connection.readable()
    } else {
        retained.behind
    };
    let read = read_out(connection, now, unread, (most, pieces));
    retained.behind -= read.min(retained.behind);
    let left = match retained.behind {
        0 => most.saturating_sub(pieces.len() - first),
        _ => 0,
    };
    let rest = retained.split_off(left);
    connection.note_taken(now, retained.length());
    let notable = connection.receive_buffer() / NOTABLE_PART;
    if connection.has_output() {
        core.touch_after_read(slot);
    }
    core.lending.put_back(slot, rest);
    pieces.extend(retained.loans.into_iter().map(|loan| {
        let account = Account {
            process,
            session,
            returned: Arc::clone(&returned),
            notable,
            bytes: loan.len(),
        };
        Piece::lent(loan, account)
    }));
    pieces[first..].iter().map(|piece| piece.len()).sum()
}

/// Copies up to `length` bytes of the receive queue. Returns how many.
fn read_out(
    connection: &mut Connection,
    now: Instant,
    length: usize,
    (most, pieces): (usize, &mut Vec<Piece>),
) -> usize {
    let _copy = layers::enter(Layer::Copy);
    let mut left = length;
    for _ in 0..most {
        let mut chunk = Chunk::new();
        chunk.resize_unspecified(left);
        let count = match left {
            0 => 0,
            _ => connection.recv(now, chunk.bytes_mut()),
        };
        if count == 0 {
            break;
        }
        chunk.resize_unspecified(count);
        left -= count;
        pieces.push(Piece::of_chunk(chunk));
        // A read ends at the urgent mark.
        if connection.is_at_mark() {
            break;
        }
    }
    length - left
}

fn take_datagram(
    process: &'static Process,
    socket: &Arc<Socket>,
    pieces: &mut Vec<Piece>,
) -> Outcome<Taken> {
    let attempt = |core: &mut Core, _: Instant| {
        if let Some(errno) = core.take_error(socket) {
            return Some(Err(errno.into()));
        }
        let Some(session) = core.stack.udp(socket.slot()) else {
            return Some(gone(socket));
        };
        session.receive().map(Ok)
    };
    let call = Call {
        process,
        socket,
        flags: 0,
        timeout: Options::receive_timeout,
    };
    let datagram = call.complete(call.lock_to_receive()?, attempt, || None)?;
    let taken = Taken {
        length: datagram.data.len(),
        from: Some(socket.shown(datagram.from)),
    };
    pieces.push(Piece::copied(Bytes::Datagram(datagram.data)));
    Ok(taken)
}

/// Sends a chunk without a copy where possible, waiting for room; `chunk` is `None` then. Unsent
/// bytes stay in `chunk`.
pub fn send_shared(fd: RawFd, chunk: &mut Option<Chunk>) -> Outcome<()> {
    let _call = layers::enter(Layer::Call);
    let placed = retry_if_moved(|| {
        let (socket, process) = find_to_use(fd, || Transfer::Any)?;
        complete_connect(process, fd, &socket);
        match (socket.settled_phase(), socket.protocol) {
            (SocketPhase::Cached, Protocol::Tcp) if !process.lock().is_local(socket.slot()) => {
                give(process, &socket, chunk)
            }
            _ => Ok(false),
        }
    });
    if placed? {
        Ok(())
    } else {
        send_copy(fd, chunk)
    }
}

/// Returns true if the chunk was accepted.
fn give(
    process: &'static Process,
    socket: &Arc<Socket>,
    chunk: &mut Option<Chunk>,
) -> Outcome<bool> {
    let length = chunk.as_ref().map_or(0, |chunk| chunk.bytes().len());
    if length == 0 {
        *chunk = None;
        return Ok(true);
    }
    let held = RefCell::new(chunk);
    let attempt = |core: &mut Core, now: Instant| {
        let slot = socket.slot();
        if core
            .stream_to_send(slot)
            .is_some_and(|stream| stream.error().is_some())
            && let Some(errno) = core.take_error(socket)
        {
            return Some(Err(errno.into()));
        }
        let Some(session) = core.stack.tcp(slot) else {
            return Some(gone(socket));
        };
        let connection = &mut session.connection;
        if connection.is_send_closed() {
            return Some(Err(Errno::PIPE.into()));
        }
        connection.options().more = false;
        let mut held = held.borrow_mut();
        let placed = match connection.send_chunk(now, held.take()?) {
            Ok(placed) => placed,
            Err(back) => {
                **held = Some(back);
                return None;
            }
        };
        core.touch(slot);
        Some(Ok(placed))
    };
    let call = Call {
        process,
        socket,
        flags: 0,
        timeout: Options::send_timeout,
    };
    let placed = call.complete(process.lock(), attempt, || None)?;
    let copied = match placed {
        Placed::InPlace { copied } => copied,
        Placed::Copied => length,
    };
    count(&SENT_COPIED, copied);
    count(&SENT_IN_PLACE, length - copied);
    Ok(true)
}

/// Sends like `send`. Sent bytes are removed from the chunk.
fn send_copy(fd: RawFd, chunk: &mut Option<Chunk>) -> Outcome<()> {
    while let Some(rest) = chunk {
        if rest.bytes().is_empty() {
            *chunk = None;
            break;
        }
        let sent = send(fd, &[IoSlice::new(rest.bytes())], None, libc::MSG_NOSIGNAL)?;
        count(&SENT_COPIED, sent);
        rest.drop_front(sent);
    }
    Ok(())
}
