//! `<portolan/buf.h>`: converts between numbers and `errno`, and pieces. These symbols are this library's own, not
//! libc's.

use std::sync::{Mutex, MutexGuard, PoisonError};

use libc::{c_int, sockaddr, socklen_t};
use portolan::posix::{self, Chunk, Outcome, Piece};
use rustix::io::Errno;

use crate::{address, memory};

/// `struct portolan_piece` and `struct portolan_room`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Shown {
    data: usize,
    length: usize,
    number: u64,
}

// SAFETY: integers without padding.
unsafe impl memory::Plain for Shown {}

/// A piece that a program has by number.
enum Held {
    Received(#[expect(dead_code, reason = "dropped to give it back")] Piece),
    Reserved(Chunk),
}

/// Pieces by number: the lower half is the index, the upper one counts the previous uses of the index.
struct Pieces {
    places: Vec<(u32, Option<Held>)>,
    free: Vec<u32>,
}

static PIECES: Mutex<Pieces> = Mutex::new(Pieces {
    places: Vec::new(),
    free: Vec::new(),
});

impl Pieces {
    fn lock() -> MutexGuard<'static, Pieces> {
        PIECES.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&mut self, held: Held) -> Result<u64, Errno> {
        let place = match self.free.pop() {
            Some(place) => place,
            None => {
                let place = u32::try_from(self.places.len()).map_err(|_| Errno::NOMEM)?;
                self.places.push((0, None));
                place
            }
        };
        let (generation, slot) = &mut self.places[place as usize];
        *slot = Some(held);
        Ok(u64::from(*generation) << 32 | u64::from(place))
    }

    fn find(&mut self, number: u64) -> Result<&mut Option<Held>, Errno> {
        let place = usize::try_from(number & 0xffff_ffff).map_err(|_| Errno::BADF)?;
        match self.places.get_mut(place) {
            Some((generation, held)) if u64::from(*generation) == number >> 32 => Ok(held),
            _ => Err(Errno::BADF),
        }
    }

    fn take(&mut self, number: u64) -> Result<Held, Errno> {
        let held = self.find(number)?.take().ok_or(Errno::BADF)?;
        self.retire(number);
        Ok(held)
    }

    /// Retires the number of a piece that was taken.
    fn retire(&mut self, number: u64) {
        let place = number as u32;
        // An index whose numbers are used up is not used again.
        if let Some((generation, None)) = self.places.get_mut(place as usize)
            && let Some(next) = generation.checked_add(1)
        {
            *generation = next;
            self.free.push(place);
        }
    }

    fn take_reserved(&mut self, number: u64) -> Result<Chunk, Errno> {
        match self.find(number)?.take() {
            Some(Held::Reserved(chunk)) => Ok(chunk),
            other => {
                *self.find(number)? = other;
                Err(Errno::BADF)
            }
        }
    }
}

own! {
    "buf.h", Errno;

    /// `ssize_t portolan_buf_receive(int, struct portolan_piece *, size_t, struct sockaddr *, socklen_t *)`
    fn portolan_buf_receive(
        fd: c_int, pieces: *mut Shown, count: usize, from: *mut sockaddr, room: *mut socklen_t,
    ) -> isize {
        if count == 0 || pieces.is_null() {
            return Err(Errno::INVAL);
        }
        let mut received = Vec::new();
        let taken = done(posix::receive_shared(fd, count, &mut received))?;
        let mut held = Pieces::lock();
        let mut shown = Vec::with_capacity(received.len());
        for piece in received {
            let (data, length) = (piece.as_ptr().expose_provenance(), piece.len());
            let number = held.enter(Held::Received(piece))?;
            shown.push(Shown { data, length, number });
        }
        memory::store(pieces, &shown).map_err(|_| Errno::FAULT)?;
        address::store_if_wanted(taken.from, from, room).map_err(|_| Errno::FAULT)?;
        Ok(shown.len().cast_signed())
    }

    /// `int portolan_buf_reserve(struct portolan_room *)`
    fn portolan_buf_reserve(room: *mut Shown) -> c_int {
        let mut chunk = Chunk::new();
        chunk.resize_unspecified(Chunk::CAPACITY);
        let (data, length) = (chunk.bytes_mut().as_mut_ptr().expose_provenance(), Chunk::CAPACITY);
        let number = Pieces::lock().enter(Held::Reserved(chunk))?;
        memory::store(room, &[Shown { data, length, number }]).map_err(|_| Errno::FAULT)?;
        Ok(0)
    }

    /// `ssize_t portolan_buf_send(int, uint64_t, size_t)`
    fn portolan_buf_send(fd: c_int, number: u64, length: usize) -> isize {
        let mut chunk = Pieces::lock().take_reserved(number)?;
        let room = chunk.bytes().len();
        if length > room {
            *Pieces::lock().find(number)? = Some(Held::Reserved(chunk));
            return Err(Errno::INVAL);
        }
        chunk.resize_unspecified(length);
        let mut unsent = Some(chunk);
        let sent = done(posix::send_shared(fd, &mut unsent));
        let Some(mut rest) = unsent else {
            Pieces::lock().retire(number);
            return sent.map(|()| length.cast_signed());
        };
        let taken = length - rest.bytes().len();
        rest.resize_unspecified(room - taken);
        *Pieces::lock().find(number)? = Some(Held::Reserved(rest));
        match taken {
            0 => sent.map(|()| 0),
            taken => Ok(taken.cast_signed()),
        }
    }

    /// `int portolan_buf_give_back(uint64_t)`
    fn portolan_buf_give_back(number: u64) -> c_int {
        let held = Pieces::lock().take(number)?;
        // Not with the table locked: this calls into the piece's session.
        drop(held);
        Ok(0)
    }
}

fn done<T>(outcome: Outcome<T>) -> Result<T, Errno> {
    outcome.map_err(|error| error.errno_or(Errno::OPNOTSUPP))
}
