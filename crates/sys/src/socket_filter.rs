//! Classic BPF filters on kernel sockets that reject packets from certain devices.

use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};

use libc::sock_filter;
use rustix::io::Errno;

use crate::descriptor::{number, set_socket_option};
use crate::raw;

const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

// linux/filter.h: SKF_AD_OFF with SKF_AD_PKTTYPE and SKF_AD_IFINDEX.
const PACKET_TYPE: u32 = (-0x1000_i32 + 4) as u32;
const INTERFACE: u32 = (-0x1000_i32 + 8) as u32;
const PACKET_HOST: u32 = 0;

/// The socket receives nothing that arrived by one of these devices.
pub fn nothing_by(socket: impl AsFd, devices: &[u32]) -> Result<(), Errno> {
    attach(socket, except_by(devices)?)
}

/// The socket receives nothing that arrived by one of these devices for several hosts.
pub fn only_for_this_host(socket: impl AsFd, devices: &[u32]) -> Result<(), Errno> {
    let of_devices = except_by(devices)?;
    // Skips the device tests, up to the first of the two returns.
    let passed = (of_devices.len() - 2) as u8;
    let of_type = [
        step(LOAD, 0, 0, PACKET_TYPE),
        step(IF_EQUAL, passed, 0, PACKET_HOST),
    ];
    attach(socket, [&of_type[..], &of_devices].concat())
}

/// The socket receives nothing.
pub fn nothing(socket: impl AsFd) -> Result<(), Errno> {
    attach(socket, vec![step(RETURN, 0, 0, 0)])
}

/// The socket receives everything again.
pub fn lift(socket: impl AsFd) -> Result<(), Errno> {
    let none = 0_i32.to_ne_bytes();
    match set_socket_option(socket, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, &none) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno),
    }
}

fn step(code: u16, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter { code, jt, jf, k }
}

/// A program that ends with two returns: accept and reject.
fn except_by(devices: &[u32]) -> Result<Vec<sock_filter>, Errno> {
    // All jump offsets must fit.
    let count = u8::try_from(devices.len())
        .ok()
        .filter(|&count| count < u8::MAX)
        .ok_or(Errno::INVAL)?;
    let mut program = vec![step(LOAD, 0, 0, INTERFACE)];
    for (&device, left) in devices.iter().zip((0..count).rev()) {
        program.push(step(IF_EQUAL, left + 1, 0, device));
    }
    program.push(step(RETURN, 0, 0, u32::MAX));
    program.push(step(RETURN, 0, 0, 0));
    Ok(program)
}

fn attach(socket: impl AsFd, mut program: Vec<sock_filter>) -> Result<(), Errno> {
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    let arguments = [
        number(socket.as_fd().as_raw_fd()),
        number(libc::SOL_SOCKET),
        number(libc::SO_ATTACH_FILTER),
        (&raw const filter).expose_provenance(),
        size_of::<libc::sock_fprog>(),
        0,
    ];
    // SAFETY: the kernel copies the program that `filter` describes; both are valid here.
    unsafe { raw::syscall(libc::SYS_setsockopt, arguments) }.map(drop)
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    const LOOPBACK: u32 = 1;

    /// Whether a socket with the change receives a datagram to this host.
    fn is_taken(change: impl Fn(&UdpSocket) -> Result<(), Errno>) -> bool {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        change(&socket).unwrap();
        socket.send_to(b"x", socket.local_addr().unwrap()).unwrap();
        socket.recv(&mut [0; 4]).is_ok()
    }

    #[test]
    fn what_came_for_this_host_alone_passes() {
        assert!(is_taken(|socket| only_for_this_host(socket, &[])));
        assert!(is_taken(|socket| {
            only_for_this_host(socket, &[LOOPBACK, 2, 3])
        }));
    }

    #[test]
    fn what_came_by_a_device_that_is_named_does_not() {
        for devices in [&[LOOPBACK, 2, 3][..], &[2, LOOPBACK, 3], &[2, 3, LOOPBACK]] {
            assert!(!is_taken(|socket| nothing_by(socket, devices)));
        }
        assert!(is_taken(|socket| nothing_by(socket, &[2, 3])));
        assert!(is_taken(|socket| nothing_by(socket, &[])));
        assert!(is_taken(|socket| {
            nothing_by(socket, &[LOOPBACK])?;
            lift(socket)
        }));
        assert!(is_taken(|socket| lift(socket)));
    }
}
