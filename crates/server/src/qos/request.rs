//! Who asks for a guarantee, and what comes of it.

use portolan_proto::qos::Refusal;
use portolan_sys::unix::Credentials;

/// Who asks.
#[derive(Clone, Copy, Debug)]
pub struct Requester {
    pub credentials: Credentials,
}

/// What a request leads to.
pub type Outcome<T = ()> = Result<T, Refusal>;

pub fn refuse<T>(errno: i32, reason: impl Into<String>) -> Outcome<T> {
    Err(Refusal {
        errno,
        reason: reason.into(),
    })
}
