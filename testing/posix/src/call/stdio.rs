//! libc's streams, and calls that transfer bytes without copying them through the program.

use std::{
    ffi::{CStr, CString, c_int},
    mem::zeroed,
    ptr,
};

use super::{Answer, Errno, Fd, answered, last_error, number};

/// A `FILE`, which is valid until it is closed.
pub struct Stream(*mut libc::FILE);

pub fn open_stream(fd: Fd, mode: &CStr) -> Answer<Stream> {
    // SAFETY: the argument is a C string.
    let stream = unsafe { libc::fdopen(fd, mode.as_ptr()) };
    if stream.is_null() {
        Err(last_error())
    } else {
        Ok(Stream(stream))
    }
}

impl Stream {
    pub fn number(&self) -> Answer<Fd> {
        // SAFETY: the stream is open.
        number(unsafe { libc::fileno(self.0) })
    }

    pub fn put(&self, text: &str) -> Answer<c_int> {
        let text = CString::new(text).expect("no NUL");
        // SAFETY: the stream is open, and the text is a C string.
        number(unsafe { libc::fputs(text.as_ptr(), self.0) }).map(|_| 0)
    }

    pub fn flush(&self) -> Answer<c_int> {
        // SAFETY: the stream is open.
        number(unsafe { libc::fflush(self.0) })
    }

    /// Returns the next line; `None` at the end.
    pub fn line(&self) -> Option<String> {
        let mut line = [0_u8; 256];
        // SAFETY: the stream is open, and `line` has the length passed.
        let got = unsafe { libc::fgets(line.as_mut_ptr().cast(), line.len() as c_int, self.0) };
        let line = CStr::from_bytes_until_nul(&line).expect("it ends");
        (!got.is_null()).then(|| line.to_string_lossy().trim_end().to_owned())
    }

    pub fn place(&self) -> Answer<usize> {
        // SAFETY: the stream is open.
        answered(unsafe { libc::ftell(self.0) })
    }

    pub fn is_at_end(&self) -> bool {
        // SAFETY: the stream is open.
        unsafe { libc::feof(self.0) != 0 }
    }

    pub fn close(self) -> Answer<c_int> {
        // SAFETY: the stream is open, and is not used afterwards.
        number(unsafe { libc::fclose(self.0) })
    }
}

/// Calls dprintf with arguments of several types, more than fit into registers.
pub fn print(fd: Fd) -> Answer<c_int> {
    unsafe extern "C" {
        fn dprintf(fd: c_int, format: *const libc::c_char, ...) -> c_int;
    }
    // SAFETY: the arguments match the format.
    number(unsafe {
        dprintf(
            fd,
            c"%s %d %.2f %c %ld %.1f %s %d %d\n".as_ptr(),
            c"text".as_ptr(),
            -7_i32,
            2.5_f64,
            i32::from(b'c'),
            1_i64 << 40,
            0.5_f64,
            c"more".as_ptr(),
            8_i32,
            9_i32,
        )
    })
}

/// Calls splice. Sockets and pipes refuse explicit offsets.
pub fn splice(from: Fd, to: Fd, length: usize, flags: u32) -> Answer<usize> {
    // SAFETY: the arguments are integers and null pointers.
    answered(unsafe { libc::splice(from, ptr::null_mut(), to, ptr::null_mut(), length, flags) })
}

pub fn splice_from(from: Fd, mut offset: i64, to: Fd) -> Answer<usize> {
    // SAFETY: the offset is valid for the call.
    answered(unsafe { libc::splice(from, &mut offset, to, ptr::null_mut(), 1, 0) })
}

pub fn splice_to(from: Fd, to: Fd, mut offset: i64) -> Answer<usize> {
    // SAFETY: the offset is valid for the call.
    answered(unsafe { libc::splice(from, ptr::null_mut(), to, &mut offset, 1, 0) })
}

/// Calls aio_read or aio_write and waits for its end.
pub fn in_background(
    start: unsafe extern "C" fn(*mut libc::aiocb) -> c_int,
    fd: Fd,
    buffer: &mut [u8],
) -> Answer<usize> {
    // SAFETY: a request of zeros is valid; it and the buffer outlive the operation, whose end is awaited.
    unsafe {
        let mut request: libc::aiocb = zeroed();
        request.aio_fildes = fd;
        request.aio_buf = buffer.as_mut_ptr().cast();
        request.aio_nbytes = buffer.len();
        number(start(&mut request))?;
        let all = [&raw const request];
        number(libc::aio_suspend(all.as_ptr(), 1, ptr::null()))?;
        match libc::aio_error(&request) {
            0 => answered(libc::aio_return(&mut request)),
            errno => Err(Errno(errno)),
        }
    }
}

/// Calls system and returns the status.
pub fn run_shell(command: &str) -> c_int {
    let command = CString::new(command).expect("no NUL");
    // SAFETY: the argument is a C string.
    unsafe { libc::system(command.as_ptr()) }
}

pub fn is_at_mark(fd: Fd) -> Answer<c_int> {
    unsafe extern "C" {
        fn sockatmark(fd: c_int) -> c_int;
    }
    // SAFETY: the argument is an integer.
    number(unsafe { sockatmark(fd) })
}

/// Calls an ioctl about an interface, and returns the bytes after the name in `struct ifreq`.
pub fn of_interface(fd: Fd, request: u64, name: &str) -> Answer<Vec<u8>> {
    let mut bytes = [0_u8; 40];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: these requests take a `struct ifreq`, which has this size.
    number(unsafe { libc::ioctl(fd, request, bytes.as_mut_ptr()) })?;
    Ok(bytes[16..32].to_vec())
}
