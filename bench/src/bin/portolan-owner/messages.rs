//! Active messages over Ethernet: a station in a program, and a caller of either that station or `messages.c`.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use portolan::raw::layers::types::MacAddr;
use portolan::raw::layers::wire::ethernet::{EtherType, EthernetHeader, HEADER_LEN};
use portolan::raw::{Guard, RawFlow};

use crate::{Failure, TRIES, print_median};

/// EtherType for local experiments (IEEE 802).
const ETHERTYPE: u16 = 0x88b5;
const HOP_PATIENCE: Duration = Duration::from_secs(5);
/// How long to wait for an answer before sending the message again.
const TIMEOUT: Duration = Duration::from_millis(100);

/// Bytes of a message: kind and handler, a sequence number, an argument.
const MESSAGE: usize = 14;
const ADD: u8 = 1;
const ANSWER: u8 = 0x80;

fn header(destination: MacAddr, source: MacAddr) -> [u8; HEADER_LEN] {
    let mut bytes = [0; HEADER_LEN];
    let header = EthernetHeader {
        destination,
        source,
        ether_type: EtherType(ETHERTYPE),
    };
    header.emit(&mut bytes);
    bytes
}

pub(crate) fn serve() -> Result<(), Failure> {
    let flow = RawFlow::open(Guard::EtherType(ETHERTYPE))?;
    let mut sum = 0_u64;
    loop {
        let frame = flow.recv(None)?.bytes;
        let Ok((from, body)) = EthernetHeader::parse(&frame) else {
            continue;
        };
        let Some(call) = body
            .first_chunk::<MESSAGE>()
            .filter(|call| call[..2] == [0, ADD])
        else {
            continue;
        };
        let mut answer = *call;
        answer[0] = ANSWER;
        let argument: [u8; 8] = call[6..].try_into()?;
        sum = sum.wrapping_add(u64::from_be_bytes(argument));
        answer[6..].copy_from_slice(&sum.to_be_bytes());
        flow.send(&header(from.source, from.destination), &answer)?;
    }
}

pub(crate) fn call(address: IpAddr, count: u32) -> Result<(), Failure> {
    let flow = RawFlow::open(Guard::EtherType(ETHERTYPE))?;
    let hop = flow.hop(address, HOP_PATIENCE)?;
    let head = header(hop.next_mac, hop.own_mac);
    for tries in 0.. {
        match add(&flow, &head, 0) {
            Ok(()) => break,
            Err(failure) if tries == TRIES => return Err(failure),
            Err(_) => {}
        }
    }
    let mut times = Vec::new();
    for number in 1..=count {
        let begun = Instant::now();
        add(&flow, &head, number)?;
        times.push(begun.elapsed());
    }
    print_median(times);
    Ok(())
}

/// Sends a message until it is answered. Ignores late answers to earlier messages.
fn add(flow: &RawFlow, head: &[u8], number: u32) -> Result<(), Failure> {
    let mut message = [0; MESSAGE];
    message[1] = ADD;
    message[2..6].copy_from_slice(&number.to_be_bytes());
    message[13] = 1;
    flow.send(head, &message)?;
    loop {
        let answer = flow.recv(Some(TIMEOUT))?.bytes;
        let answer = answer.get(HEADER_LEN..).unwrap_or_default();
        if answer.first() == Some(&ANSWER) && answer.get(2..6) == Some(&message[2..6]) {
            return Ok(());
        }
    }
}
