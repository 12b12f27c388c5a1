//! An echo server as an event loop on mio, over the sockets of `portolan::net::mio`.
//!
//! usage: portolan-mio ADDRESS:PORT
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::error::Error;
use std::io::{ErrorKind, Read, Write};

use mio::event::Event;
use mio::{Events, Interest, Poll, Token};
use portolan::net::mio::{TcpListener, TcpStream};

const LISTENER: Token = Token(0);
const FIRST: usize = 1;

/// A connection, and what it has not sent yet.
struct Echo {
    stream: TcpStream,
    unsent: Vec<u8>,
}

impl Echo {
    /// Returns false at the end of the connection.
    fn go_on(&mut self) -> std::io::Result<bool> {
        loop {
            while !self.unsent.is_empty() {
                match self.stream.write(&self.unsent) {
                    Ok(sent) => drop(self.unsent.drain(..sent)),
                    Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
                    Err(error) => return Err(error),
                }
            }
            let mut bytes = [0; 16 << 10];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Ok(false),
                Ok(count) => self.unsent.extend_from_slice(&bytes[..count]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(true),
                Err(error) => return Err(error),
            }
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let endpoint = std::env::args()
        .nth(1)
        .ok_or("usage: portolan-mio ENDPOINT")?;
    let mut poll = Poll::new()?;
    let mut events = Events::with_capacity(128);
    let mut listener = TcpListener::bind(endpoint.parse()?)?;
    poll.registry()
        .register(&mut listener, LISTENER, Interest::READABLE)?;
    let mut echoes = HashMap::new();
    let mut next = FIRST;
    loop {
        poll.poll(&mut events, None)?;
        for token in events.iter().map(Event::token) {
            if token == LISTENER {
                accept(&poll, &listener, (&mut echoes, &mut next))?;
            } else if let Some(echo) = echoes.get_mut(&token)
                && !matches!(echo.go_on(), Ok(true))
            {
                poll.registry().deregister(&mut echo.stream)?;
                echoes.remove(&token);
            }
        }
    }
}

fn accept(
    poll: &Poll,
    listener: &TcpListener,
    (echoes, next): (&mut HashMap<Token, Echo>, &mut usize),
) -> std::io::Result<()> {
    loop {
        let mut stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        };
        let token = Token(*next);
        *next += 1;
        let both = Interest::READABLE | Interest::WRITABLE;
        poll.registry().register(&mut stream, token, both)?;
        let unsent = Vec::new();
        echoes.insert(token, Echo { stream, unsent });
    }
}
