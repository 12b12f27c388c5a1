//! libc's streams on Portolan's descriptors. libc reads, writes and closes them by internal calls
//! that do not use symbols. Therefore a stream on such a descriptor is a "cookie" stream of libc's,
//! whose calls come here; output to a descriptor without a stream is printed to memory first.

use std::{
    ffi::{c_char, c_int, c_void},
    ptr,
};

use libc::{off64_t, size_t, ssize_t};
use rustix::io::Errno;

use crate::{
    descriptors,
    interpose::{CallError, Outcome, failed, ours},
    io, memory,
};

/// `cookie_io_functions_t`
#[repr(C)]
struct Functions {
    read: unsafe extern "C-unwind" fn(*mut c_void, *mut c_char, size_t) -> ssize_t,
    write: unsafe extern "C-unwind" fn(*mut c_void, *const c_char, size_t) -> ssize_t,
    seek: unsafe extern "C-unwind" fn(*mut c_void, *mut off64_t, c_int) -> c_int,
    close: unsafe extern "C-unwind" fn(*mut c_void) -> c_int,
}

/// The part of `struct _IO_FILE` that is declared in glibc's public header and needed here.
#[repr(C)]
struct Stream {
    _flags: c_int,
    _pointers: [*mut c_void; 13],
    fileno: c_int,
}

/// `va_list` as an argument: an array on x86-64, and a structure too large for registers on
/// aarch64; so an address on both.
type Arguments = *mut c_void;

unsafe extern "C" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Functions) -> *mut Stream;
    fn vasprintf(text: *mut *mut c_char, format: *const c_char, arguments: Arguments) -> c_int;
    fn __vasprintf_chk(
        text: *mut *mut c_char,
        flag: c_int,
        format: *const c_char,
        arguments: Arguments,
    ) -> c_int;
}

interpose! {
    /// `FILE *fdopen(int, const char *)`
    fn fdopen(fd: c_int, mode: *const c_char) -> *mut c_void {
        open(fd, mode)
    }

    /// `FILE *_IO_fdopen(int, const char *)`: for old binaries.
    fn _IO_fdopen(fd: c_int, mode: *const c_char) -> *mut c_void {
        open(fd, mode)
    }

    /// `int vdprintf(int, const char *, va_list)`
    fn vdprintf(fd: c_int, format: *const c_char, arguments: Arguments) -> c_int {
        ours(fd)?;
        print(fd, |text| vasprintf(text, format, arguments))
    }

    /// `int __vdprintf_chk(int, int, const char *, va_list)`
    fn __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, arguments: Arguments) -> c_int {
        ours(fd)?;
        print(fd, |text| __vasprintf_chk(text, flag, format, arguments))
    }
}

/// Opens a stream that differs from libc's own only in where its calls go: `fileno` returns its number.
///
/// # Safety
/// `mode` is a C string.
unsafe fn open(fd: c_int, mode: *const c_char) -> Outcome<*mut c_void> {
    ours(fd)?;
    // SAFETY: the functions match the cookie, which is the number; the mode is the caller's.
    unsafe {
        if *mode == b'a' as c_char {
            let status = descriptors::fcntl(fd, libc::F_GETFL, 0);
            descriptors::fcntl(fd, libc::F_SETFL, (status | libc::O_APPEND) as usize);
        }
        let functions = Functions {
            read: read_for,
            write: write_for,
            seek: seek_for,
            close: close_for,
        };
        let stream = fopencookie(ptr::without_provenance_mut(fd as usize), mode, functions);
        if stream.is_null() {
            return Err(memory::last_error().into());
        }
        (*stream).fileno = fd;
        Ok(stream.cast())
    }
}

unsafe extern "C-unwind" fn read_for(
    cookie: *mut c_void,
    buffer: *mut c_char,
    room: size_t,
) -> ssize_t {
    // SAFETY: libc's buffer of that size.
    unsafe { io::read(cookie.addr() as c_int, buffer.cast(), room) }
}

/// Like libc's own streams, writes all bytes, or returns how many were written before an error; 0 means none.
unsafe extern "C-unwind" fn write_for(
    cookie: *mut c_void,
    text: *const c_char,
    length: size_t,
) -> ssize_t {
    // SAFETY: libc's buffer of that size.
    unsafe { write_all(cookie.addr() as c_int, text, length) as ssize_t }
}

unsafe extern "C-unwind" fn seek_for(_: *mut c_void, _: *mut off64_t, _: c_int) -> c_int {
    failed(Errno::SPIPE)
}

unsafe extern "C-unwind" fn close_for(cookie: *mut c_void) -> c_int {
    // SAFETY: the stream's owner closes the descriptor.
    unsafe { descriptors::close(cookie.addr() as c_int) }
}

/// # Safety
/// `text` is readable for `length` bytes.
unsafe fn write_all(fd: c_int, text: *const c_char, length: size_t) -> size_t {
    let mut done = 0;
    while done < length {
        // SAFETY: the caller's promise.
        let written = unsafe { io::write(fd, text.add(done).cast(), length - done) };
        match usize::try_from(written) {
            Ok(count @ 1..) => done += count,
            Ok(0) | Err(_) => break,
        }
    }
    done
}

/// Formats to memory, and writes the text to `fd`.
///
/// # Safety
/// `format` has the result of `vasprintf`.
unsafe fn print(fd: c_int, format: impl FnOnce(*mut *mut c_char) -> c_int) -> Outcome<c_int> {
    let mut text = ptr::null_mut();
    let length = format(&raw mut text);
    let Ok(bytes) = size_t::try_from(length) else {
        return Err(memory::last_error().into());
    };
    // SAFETY: the text has that length, and is freed here.
    let written = unsafe {
        let written = write_all(fd, text, bytes);
        let errno = memory::last_error();
        libc::free(text.cast());
        if written < bytes { Err(errno) } else { Ok(()) }
    };
    written.map_err(CallError::from)?;
    Ok(length)
}

/// Defines a symbol with variable arguments: makes a `va_list` of them, as the C compiler does, and
/// calls the symbol that takes one.
macro_rules! listed {
    ($($(#[$note:meta])* $name:ident => $taking:ident, $list:literal, $used:literal, $list64:literal, $left:literal;)*) => { $(
        $(#[$note])*
        ///
        /// # Safety
        /// The contract of the C function of this name.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub(crate) unsafe extern "C" fn $name() {
            // System V ABI, AMD64, §3.5.7: the registers' save area at 32, the list at 0.
            #[cfg(target_arch = "x86_64")]
            std::arch::naked_asm!(
                "sub rsp, 216",
                "mov [rsp + 32], rdi",
                "mov [rsp + 40], rsi",
                "mov [rsp + 48], rdx",
                "mov [rsp + 56], rcx",
                "mov [rsp + 64], r8",
                "mov [rsp + 72], r9",
                "movaps [rsp + 80], xmm0",
                "movaps [rsp + 96], xmm1",
                "movaps [rsp + 112], xmm2",
                "movaps [rsp + 128], xmm3",
                "movaps [rsp + 144], xmm4",
                "movaps [rsp + 160], xmm5",
                "movaps [rsp + 176], xmm6",
                "movaps [rsp + 192], xmm7",
                concat!("mov dword ptr [rsp], ", $used),
                "mov dword ptr [rsp + 4], 48",
                "lea rax, [rsp + 224]",
                "mov [rsp + 8], rax",
                "lea rax, [rsp + 32]",
                "mov [rsp + 16], rax",
                concat!("mov ", $list, ", rsp"),
                "call {taking}",
                "add rsp, 216",
                "ret",
                taking = sym $taking,
            );
            // AAPCS64, appendix B: the list at 16, general registers at 48, the others at 112.
            #[cfg(target_arch = "aarch64")]
            std::arch::naked_asm!(
                "stp x29, x30, [sp, #-240]!",
                "stp x0, x1, [sp, #48]",
                "stp x2, x3, [sp, #64]",
                "stp x4, x5, [sp, #80]",
                "stp x6, x7, [sp, #96]",
                "stp q0, q1, [sp, #112]",
                "stp q2, q3, [sp, #144]",
                "stp q4, q5, [sp, #176]",
                "stp q6, q7, [sp, #208]",
                "add x9, sp, #240",
                "str x9, [sp, #16]",
                "str x9, [sp, #32]",
                "add x9, sp, #112",
                "str x9, [sp, #24]",
                concat!("mov w9, #", $left),
                "str w9, [sp, #40]",
                "mov w9, #-128",
                "str w9, [sp, #44]",
                concat!("add ", $list64, ", sp, #16"),
                "bl {taking}",
                "ldp x29, x30, [sp], #240",
                "ret",
                taking = sym $taking,
            );
        }
    )* };
}

listed! {
    /// `int dprintf(int, const char *, ...)`
    dprintf => vdprintf, "rdx", "16", "x2", "-48";
    /// `int __dprintf_chk(int, int, const char *, ...)`
    __dprintf_chk => __vdprintf_chk, "rcx", "24", "x3", "-40";
}
