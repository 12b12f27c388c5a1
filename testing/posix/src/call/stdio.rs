//! libc's streams, and the calls that move bytes without passing them through the program.

use std::{
    ffi::{CStr, CString, c_int},
    mem::zeroed,
    ptr,
};

use super::{Answer, Errno, Fd, answered, last_error, number};

/// A `FILE`, which lives until it is closed.
pub struct Stream(*mut libc::FILE);

pub fn open_stream(fd: Fd, mode: &CStr) -> Answer<Stream> {
    // SAFETY: a C string.
    let stream = unsafe { libc::fdopen(fd, mode.as_ptr()) };
    if stream.is_null() {
        Err(last_error())
    } else {
        Ok(Stream(stream))
    }
}

impl Stream {
    pub fn number(&self) -> Answer<Fd> {
        // SAFETY: an open stream.
        number(unsafe { libc::fileno(self.0) })
    }

    pub fn put(&self, text: &str) -> Answer<c_int> {
        let text = CString::new(text).expect("no NUL");
        // SAFETY: an open stream and a C string.
        number(unsafe { libc::fputs(text.as_ptr(), self.0) }).map(|_| 0)
    }

    pub fn flush(&self) -> Answer<c_int> {
        // SAFETY: an open stream.
        number(unsafe { libc::fflush(self.0) })
    }

    /// The next line; `None` at the end.
    pub fn line(&self) -> Option<String> {
        let mut line = [0_u8; 256];
        // SAFETY: an open stream; the room is what is told.
        let got = unsafe { libc::fgets(line.as_mut_ptr().cast(), line.len() as c_int, self.0) };
        let line = CStr::from_bytes_until_nul(&line).expect("it ends");
        (!got.is_null()).then(|| line.to_string_lossy().trim_end().to_owned())
    }

    pub fn place(&self) -> Answer<usize> {
        // SAFETY: an open stream.
        answered(unsafe { libc::ftell(self.0) })
    }

    pub fn is_at_end(&self) -> bool {
        // SAFETY: an open stream.
        unsafe { libc::feof(self.0) != 0 }
    }

    pub fn close(self) -> Answer<c_int> {
        // SAFETY: an open stream, which nobody uses afterwards.
        number(unsafe { libc::fclose(self.0) })
    }
}

/// dprintf with arguments of several kinds, more than registers hold.
pub fn print(fd: Fd) -> Answer<c_int> {
    unsafe extern "C" {
        fn dprintf(fd: c_int, format: *const libc::c_char, ...) -> c_int;
    }
    // SAFETY: the arguments are those of the format.
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

/// splice; offsets that are given are refused by sockets and pipes.
pub fn splice(from: Fd, to: Fd, length: usize, flags: u32) -> Answer<usize> {
    // SAFETY: integers and null pointers.
    answered(unsafe { libc::splice(from, ptr::null_mut(), to, ptr::null_mut(), length, flags) })
}

pub fn splice_from(from: Fd, mut offset: i64, to: Fd) -> Answer<usize> {
    // SAFETY: the offset is live.
    answered(unsafe { libc::splice(from, &mut offset, to, ptr::null_mut(), 1, 0) })
}

pub fn splice_to(from: Fd, to: Fd, mut offset: i64) -> Answer<usize> {
    // SAFETY: the offset is live.
    answered(unsafe { libc::splice(from, ptr::null_mut(), to, &mut offset, 1, 0) })
}

/// aio_read or aio_write, waited for.
pub fn in_background(
    start: unsafe extern "C" fn(*mut libc::aiocb) -> c_int,
    fd: Fd,
    buffer: &mut [u8],
) -> Answer<usize> {
    // SAFETY: zeros are a request; it and the buffer outlive it, as it is waited for.
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

/// system: the status.
pub fn run_shell(command: &str) -> c_int {
    let command = CString::new(command).expect("no NUL");
    // SAFETY: a C string.
    unsafe { libc::system(command.as_ptr()) }
}

pub fn is_at_mark(fd: Fd) -> Answer<c_int> {
    unsafe extern "C" {
        fn sockatmark(fd: c_int) -> c_int;
    }
    // SAFETY: an integer.
    number(unsafe { sockatmark(fd) })
}

/// An ioctl about an interface: what is behind its name in `struct ifreq`.
pub fn of_interface(fd: Fd, request: u64, name: &str) -> Answer<Vec<u8>> {
    let mut bytes = [0_u8; 40];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: these requests take a `struct ifreq`, which is as long.
    number(unsafe { libc::ioctl(fd, request, bytes.as_mut_ptr()) })?;
    Ok(bytes[16..32].to_vec())
}
