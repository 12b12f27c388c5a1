//! Loads a single program from its instructions, which libbpf's objects do not support.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use libbpf_rs::libbpf_sys;

/// Size of the verifier's log; recent kernels keep the end of a longer one.
const LOG_SIZE: usize = 256 * 1024;

/// A program that the kernel has verified.
#[derive(Debug)]
pub struct Loaded {
    pub program: OwnedFd,
    /// Number of instructions that the verifier processed.
    pub verified: u32,
}

/// Why the kernel refuses a program.
#[derive(Debug, thiserror::Error)]
#[error("{source}: {log}")]
pub struct Refused {
    pub source: io::Error,
    /// The verifier's log.
    pub log: String,
}

/// Loads a program for tc hooks. What the verifier permits depends on the calling thread's
/// privileges.
pub(crate) fn load(name: &CStr, instructions: &[u64]) -> Result<Loaded, Refused> {
    let program = attempt(name, instructions, None).or_else(|_| {
        let mut log = vec![0u8; LOG_SIZE];
        attempt(name, instructions, Some(&mut log)).map_err(|source| Refused {
            source,
            log: text_of(&log),
        })
    })?;
    let verified = verified_instructions(&program).map_err(|source| Refused {
        source,
        log: "the kernel does not say how many instructions it verified".to_owned(),
    })?;
    Ok(Loaded { program, verified })
}

fn text_of(log: &[u8]) -> String {
    let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
    String::from_utf8_lossy(&log[..end]).into_owned()
}

fn attempt(name: &CStr, instructions: &[u64], log: Option<&mut [u8]>) -> io::Result<OwnedFd> {
    let mut options = libbpf_sys::bpf_prog_load_opts {
        sz: size_of::<libbpf_sys::bpf_prog_load_opts>() as libbpf_sys::size_t,
        attempts: 1,
        ..Default::default()
    };
    if let Some(log) = log {
        options.log_level = 1;
        options.log_size = log.len() as u32;
        options.log_buf = log.as_mut_ptr().cast();
    }
    // SAFETY: both strings are zero-terminated, the number of instructions is right, each is eight
    // bytes like the kernel's, and the log is valid until the call returns.
    let fd = unsafe {
        libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_SCHED_CLS,
            name.as_ptr(),
            c"".as_ptr(),
            instructions.as_ptr().cast(),
            instructions.len() as libbpf_sys::size_t,
            &raw mut options,
        )
    };
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the call has just opened it, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn verified_instructions(program: &OwnedFd) -> io::Result<u32> {
    let mut info = libbpf_sys::bpf_prog_info::default();
    let mut length = size_of_val(&info) as u32;
    // SAFETY: the kernel writes at most `length` bytes into `info`, which requests no arrays.
    let answer = unsafe {
        libbpf_sys::bpf_obj_get_info_by_fd(
            program.as_fd().as_raw_fd(),
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    match answer {
        0 => Ok(info.verified_insns),
        failed => Err(io::Error::from_raw_os_error(-failed)),
    }
}
