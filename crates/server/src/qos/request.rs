//! The sender of a request for a guarantee, and its result.

use portolan_proto::qos::Refusal;
use portolan_sys::unix::Credentials;

/// The sender of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Requester {
    pub credentials: Credentials,
}

/// The result of a request.
pub(super) type Outcome<T = ()> = Result<T, Refusal>;

pub(super) fn refuse<T>(errno: i32, reason: impl Into<String>) -> Outcome<T> {
    Err(Refusal {
        errno,
        reason: reason.into(),
    })
}
