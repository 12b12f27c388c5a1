//! Active messages over Ethernet (PX §3.3; von Eicken, 1992): each message names the handler that is run when it
//! arrives, with its argument. No IP, no TCP; a frame of an EtherType of its own carries one message.
//!
//!     active-messages serve
//!     active-messages call ADDRESS COUNT [OBJECT]
//!
//! `call` reaches the station that has an IP address, has it add up 1 to COUNT, and tells how long a call took.
//! OBJECT has a handler for what it sends (`Ethernet.PacketSend`).

use std::net::IpAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use portolan::raw::layers::types::MacAddr;
use portolan::raw::layers::wire::ethernet::{EtherType, EthernetHeader, HEADER_LEN};
use portolan::raw::{Errno, Guard, RawFlow};
use portolan_examples::install;

/// For local experiments (IEEE 802).
const ETHERTYPE: u16 = 0x88b5;
const HEAD: usize = HEADER_LEN + Message::LEN;
const TIMEOUT: Duration = Duration::from_secs(2);

/// The handlers by their numbers.
const HANDLERS: [fn(&mut u64, u64) -> u64; 3] = [echo, add, read];
const ADD: u16 = 1;
const READ: u16 = 2;
/// Set in the number of an answer's handler.
const ANSWER: u16 = 0x8000;

fn echo(_sum: &mut u64, argument: u64) -> u64 {
    argument
}

fn add(sum: &mut u64, argument: u64) -> u64 {
    *sum = sum.wrapping_add(argument);
    *sum
}

fn read(sum: &mut u64, _argument: u64) -> u64 {
    std::mem::take(sum)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Message {
    handler: u16,
    sequence: u32,
    argument: u64,
}

impl Message {
    const LEN: usize = 14;

    fn parse(bytes: &[u8]) -> Option<Message> {
        let (handler, rest) = bytes.split_first_chunk()?;
        let (sequence, rest) = rest.split_first_chunk()?;
        Some(Message {
            handler: u16::from_be_bytes(*handler),
            sequence: u32::from_be_bytes(*sequence),
            argument: u64::from_be_bytes(*rest.first_chunk()?),
        })
    }

    fn to(self, destination: MacAddr, source: MacAddr) -> [u8; HEAD] {
        let mut frame = [0; HEAD];
        let header = EthernetHeader {
            destination,
            source,
            ether_type: EtherType(ETHERTYPE),
        };
        header.emit(&mut frame);
        frame[HEADER_LEN..][..2].copy_from_slice(&self.handler.to_be_bytes());
        frame[HEADER_LEN + 2..][..4].copy_from_slice(&self.sequence.to_be_bytes());
        frame[HEADER_LEN + 6..].copy_from_slice(&self.argument.to_be_bytes());
        frame
    }
}

/// The next message of the flow and who sent it; what is no message is passed over.
fn next(flow: &RawFlow, patience: Option<Duration>) -> Result<(EthernetHeader, Message), Errno> {
    loop {
        let frame = flow.recv(patience)?.bytes;
        if let Ok((header, body)) = EthernetHeader::parse(&frame)
            && let Some(message) = Message::parse(body)
        {
            return Ok((header, message));
        }
    }
}

fn serve(flow: &RawFlow) -> Result<(), Errno> {
    let mut sum = 0;
    println!("serving");
    loop {
        let (header, message) = next(flow, None)?;
        let Some(handler) = HANDLERS.get(usize::from(message.handler)) else {
            continue;
        };
        let answer = Message {
            handler: message.handler | ANSWER,
            argument: handler(&mut sum, message.argument),
            ..message
        };
        flow.send(&answer.to(header.source, header.destination), &[])?;
    }
}

/// Runs a handler over there, once: a call that gets no answer is not made again.
fn call(flow: &RawFlow, (to, from): (MacAddr, MacAddr), message: Message) -> Result<u64, Errno> {
    flow.send(&message.to(to, from), &[])?;
    loop {
        let (_, answer) = next(flow, Some(TIMEOUT))?;
        if answer.sequence == message.sequence && answer.handler == message.handler | ANSWER {
            return Ok(answer.argument);
        }
    }
}

fn sum_up(flow: &RawFlow, address: IpAddr, count: u32) -> Result<(), Errno> {
    let hop = flow.hop(address, TIMEOUT)?;
    let way = (hop.next_mac, hop.own_mac);
    let begun = Instant::now();
    for sequence in 1..=count {
        let message = Message {
            handler: ADD,
            sequence,
            argument: sequence.into(),
        };
        call(flow, way, message)?;
    }
    let took = begun.elapsed();
    let message = Message {
        handler: READ,
        sequence: count + 1,
        argument: 0,
    };
    println!("sum {}", call(flow, way, message)?);
    println!("{} ns per call", took.as_nanos() / u128::from(count.max(1)));
    Ok(())
}

fn parse_and_sum_up(flow: &RawFlow, address: &str, count: &str) -> Result<(), Errno> {
    match (address.parse(), count.parse()) {
        (Ok(address), Ok(count)) => sum_up(flow, address, count),
        _ => Err(Errno::INVAL),
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let done = RawFlow::open(Guard::EtherType(ETHERTYPE)).and_then(|flow| match words[..] {
        ["serve"] => serve(&flow),
        ["call", address, count] => parse_and_sum_up(&flow, address, count),
        ["call", address, count, object] => {
            let _handler = install(&flow, object)?;
            parse_and_sum_up(&flow, address, count)
        }
        _ => Err(Errno::INVAL),
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(errno) => {
            eprintln!("active-messages: {errno}");
            ExitCode::FAILURE
        }
    }
}
