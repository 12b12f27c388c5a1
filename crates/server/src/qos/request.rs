//! The sender of a request for a guarantee, and its result.

use portolan_control::qos::transmit::{ClassId, Link, Refused};
use portolan_proto::qos::Refusal;
use portolan_sys::unix::Credentials;

/// The sender of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Requester {
    pub credentials: Credentials,
    pub basis: Basis,
}

/// Where a request comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Basis {
    Request,
    /// The configuration.
    Policy,
    /// The previous server has granted it, in this class: the sender's rights were checked then.
    Record {
        class: Option<ClassId>,
    },
}

impl Requester {
    /// Promises a rate of the link to a class, if the link has as much to promise, or had.
    pub(super) fn reserve(&self, link: &mut Link, class: ClassId, rate: u64) -> Outcome {
        let uid = self.credentials.uid;
        match self.basis {
            Basis::Request | Basis::Policy => link.reserve(class, uid, rate).map_err(refusal),
            Basis::Record { .. } => {
                link.reserve_again(class, uid, rate);
                Ok(())
            }
        }
    }

    /// Returns the class that it had.
    pub(super) fn former_class(&self) -> Option<ClassId> {
        match self.basis {
            Basis::Record { class } => class,
            Basis::Request | Basis::Policy => None,
        }
    }
}

/// The result of a request.
pub(super) type Outcome<T = ()> = Result<T, Refusal>;

pub(super) fn refuse<T>(errno: i32, reason: impl Into<String>) -> Outcome<T> {
    Err(Refusal {
        errno,
        reason: reason.into(),
    })
}

pub(super) fn refusal(refused: Refused) -> Refusal {
    Refusal {
        errno: refused.errno().0,
        reason: refused.to_string(),
    }
}
