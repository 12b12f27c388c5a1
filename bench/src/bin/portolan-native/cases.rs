//! Uses of pieces that are wrong or rare. Each case listens, receives a stream of pattern bytes, and ends without an
//! error if the library behaves as it should.

use std::io;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use portolan::net::buf::{Piece, moved};
use portolan::net::{TcpListener, TcpStream};
use rustix::time::{ClockId, clock_gettime};

use crate::{fork, pattern};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Case {
    /// Keeps every piece until the window stops the peer, then releases them in another order and continues.
    Keep,
    /// Keeps a piece of one connection while other connections open and close, and reports the processor time while it
    /// waits for them.
    KeepOne,
    /// Uses pieces after the connection is closed.
    AfterClose,
    /// Releases pieces in other threads.
    Threads,
    /// Forks while it has pieces and more data is unread: the child uses the pieces it inherits, and receives the rest.
    Fork,
    /// Alternates between the socket call and shared buffers.
    Mixed,
}

pub(crate) fn play(case: Case, address: SocketAddr) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    match case {
        Case::Keep => keep(&listener),
        Case::KeepOne => keep_one(&listener),
        Case::AfterClose => after_close(&listener),
        Case::Threads => threads(&listener),
        Case::Fork => with_child(&listener),
        Case::Mixed => mixed(&listener),
    }
}

/// Less than any window of a connection that has transferred some data.
const HELD_MAX: usize = 32 * 1024;

/// Receive buffer of a program that keeps what it gets.
const BUFFER: u32 = 1 << 20;

/// A piece and its position in the stream.
struct Held {
    position: u64,
    piece: Piece,
}

impl Held {
    fn check(&self) -> io::Result<()> {
        pattern::check(self.position, &self.piece)
    }
}

/// Appends the next pieces to `held`. Returns true at the end of the stream.
fn receive(stream: &TcpStream, total: &mut u64, held: &mut Vec<Held>) -> io::Result<bool> {
    let mut pieces = Vec::new();
    let count = stream.receive(&mut pieces)?;
    for piece in pieces {
        let position = *total;
        *total += piece.len() as u64;
        held.push(Held { position, piece });
    }
    Ok(count == 0)
}

fn finish(stream: TcpStream, total: u64) -> io::Result<()> {
    io::Write::write_all(&mut &stream, &total.to_be_bytes())?;
    println!("all {total} bytes, {:?}", moved());
    Ok(())
}

fn keep(listener: &TcpListener) -> io::Result<()> {
    let (stream, _) = listener.accept()?;
    let (mut total, mut held) = (0, Vec::new());
    stream.set_receive_buffer(BUFFER)?;
    stream.set_read_timeout(Some(Duration::from_millis(500)))?;
    let open = || io::Error::other("the window stays open");
    loop {
        match receive(&stream, &mut total, &mut held) {
            Ok(false) => {}
            Ok(true) => return Err(open()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) => return Err(error),
        }
    }
    println!("stopped at {total}");
    let in_place = held.iter().filter(|held| held.piece.is_in_place());
    let in_place: usize = in_place.map(|held| held.piece.len()).sum();
    // As on Linux, the buffer has twice the bytes that were asked for.
    if in_place > 2 * BUFFER as usize {
        return Err(open());
    }
    held.iter().try_for_each(Held::check)?;
    // Release the last piece first, then every other one.
    let mut rest = Vec::new();
    while let Some(last) = held.pop() {
        rest.extend(held.pop());
        drop(last);
    }
    rest.iter().try_for_each(Held::check)?;
    drop(rest);
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    while !receive(&stream, &mut total, &mut held)? {
        held.drain(..).try_for_each(|it| it.check())?;
    }
    finish(stream, total)
}

fn keep_one(listener: &TcpListener) -> io::Result<()> {
    let (first, _) = listener.accept()?;
    let (mut total, mut kept) = (0, Vec::new());
    while !kept.iter().any(|held: &Held| held.piece.is_in_place()) {
        kept.retain(|held| held.piece.is_in_place());
        receive(&first, &mut total, &mut kept)?;
    }
    println!("keeps one");
    let (start, busy) = (Instant::now(), processor_time());
    let (second, _) = listener.accept()?;
    let busy = processor_time() - busy;
    println!(
        "waited {} ms, busy {} ms",
        start.elapsed().as_millis(),
        busy.as_millis()
    );
    let (mut other, mut held) = (0, Vec::new());
    let start = Instant::now();
    while !receive(&second, &mut other, &mut held)? {
        held.drain(..).try_for_each(|it| it.check())?;
    }
    println!("{other} bytes in {:?}", start.elapsed());
    kept.iter().try_for_each(Held::check)?;
    finish(second, other)?;
    while !receive(&first, &mut total, &mut held)? {
        held.drain(..).try_for_each(|it| it.check())?;
    }
    kept.iter().try_for_each(Held::check)?;
    finish(first, total)
}

/// Returns the processor time of all threads.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::from_secs(time.tv_sec.unsigned_abs())
        + Duration::from_nanos(time.tv_nsec.unsigned_abs())
}

fn after_close(listener: &TcpListener) -> io::Result<()> {
    let (stream, _) = listener.accept()?;
    let (mut total, mut held) = (0, Vec::new());
    while !receive(&stream, &mut total, &mut held)? {
        // Held bytes count against the window, which must not close.
        while held.len() > 1 && held.iter().map(|it| it.piece.len()).sum::<usize>() > HELD_MAX {
            held.remove(0);
        }
    }
    finish(stream, total)?;
    held.iter().try_for_each(Held::check)?;
    drop(held);
    // The next session may reuse the slot.
    let (stream, _) = listener.accept()?;
    let (mut total, mut held) = (0, Vec::new());
    while !receive(&stream, &mut total, &mut held)? {
        held.drain(..).try_for_each(|it| it.check())?;
    }
    finish(stream, total)
}

fn threads(listener: &TcpListener) -> io::Result<()> {
    let (stream, _) = listener.accept()?;
    let (to, from) = std::sync::mpsc::channel::<Held>();
    let checker = thread::spawn(move || from.into_iter().try_for_each(|held| held.check()));
    let (mut total, mut held) = (0, Vec::new());
    while !receive(&stream, &mut total, &mut held)? {
        for held in held.drain(..) {
            to.send(held).map_err(io::Error::other)?;
        }
    }
    drop(to);
    checker
        .join()
        .map_err(|_| io::Error::other("the checker panicked"))??;
    finish(stream, total)
}

fn with_child(listener: &TcpListener) -> io::Result<()> {
    let (stream, _) = listener.accept()?;
    let (mut total, mut held) = (0, Vec::new());
    while total < 4 << 20 {
        receive(&stream, &mut total, &mut held)?;
        let surplus = held.len().saturating_sub(4);
        held.drain(..surplus);
    }
    // Data arrives during this time and stays unread.
    thread::sleep(Duration::from_millis(50));
    let Some(child) = fork::fork()? else {
        return in_child(stream, total, held);
    };
    // The child takes over the session; both have the pieces received before.
    drop(stream);
    let outcome = child.wait();
    held.iter().try_for_each(Held::check)?;
    outcome
}

fn in_child(stream: TcpStream, mut total: u64, inherited: Vec<Held>) -> io::Result<()> {
    inherited.iter().try_for_each(Held::check)?;
    let mut held = Vec::new();
    while !receive(&stream, &mut total, &mut held)? {
        held.drain(..).try_for_each(|it| it.check())?;
    }
    inherited.iter().try_for_each(Held::check)?;
    finish(stream, total)
}

fn mixed(listener: &TcpListener) -> io::Result<()> {
    let (stream, _) = listener.accept()?;
    let (mut total, mut held) = (0, Vec::new());
    let mut buffer = vec![0; 100_000];
    loop {
        for _ in 0..3 {
            receive(&stream, &mut total, &mut held)?;
        }
        held.drain(..).try_for_each(|it| it.check())?;
        let count = io::Read::read(&mut &stream, &mut buffer)?;
        if count == 0 {
            return finish(stream, total);
        }
        pattern::check(total, &buffer[..count])?;
        total += count as u64;
    }
}
