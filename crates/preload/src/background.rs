//! Asynchronous I/O (aio(7)): libc's threads perform it by internal calls, on the descriptor
//! itself. Therefore the server relays sockets that are used for it.

use libc::{aiocb, c_int, sigevent};
use portolan::posix;
use rustix::io::Errno;

use crate::interpose::{CallError, Outcome, ours};

interpose! {
    /// `int aio_read(struct aiocb *)`
    fn aio_read(request: *mut aiocb) -> c_int {
        serve(request)
    }

    /// `int aio_read64(struct aiocb64 *)`
    fn aio_read64(request: *mut aiocb) -> c_int {
        serve(request)
    }

    /// `int aio_write(struct aiocb *)`
    fn aio_write(request: *mut aiocb) -> c_int {
        serve(request)
    }

    /// `int aio_write64(struct aiocb64 *)`
    fn aio_write64(request: *mut aiocb) -> c_int {
        serve(request)
    }

    /// `int lio_listio(int, struct aiocb *restrict const[], int, struct sigevent *)`
    fn lio_listio(mode: c_int, requests: *const *mut aiocb, count: c_int, then: *mut sigevent) -> c_int {
        serve_all(requests, count)
    }

    /// `int lio_listio64(int, struct aiocb64 *restrict const[], int, struct sigevent *)`
    fn lio_listio64(mode: c_int, requests: *const *mut aiocb, count: c_int, then: *mut sigevent) -> c_int {
        serve_all(requests, count)
    }
}

/// # Safety
/// `request` is null or a request.
unsafe fn serve<T>(request: *mut aiocb) -> Outcome<T> {
    // SAFETY: the caller's promise.
    let Some(request) = (unsafe { request.as_ref() }) else {
        return Err(CallError::NotOurs);
    };
    ours(request.aio_fildes)?;
    if posix::before_lending(request.aio_fildes) {
        Err(CallError::NotOurs)
    } else {
        Err(Errno::NOSYS.into())
    }
}

/// # Safety
/// `requests` is an array of `count` pointers, each null or to a request.
unsafe fn serve_all<T>(requests: *const *mut aiocb, count: c_int) -> Outcome<T> {
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the caller's promise.
        if let Err(CallError::Errno(errno)) = unsafe { serve::<()>(*requests.add(index)) } {
            return Err(errno.into());
        }
    }
    Err(CallError::NotOurs)
}
