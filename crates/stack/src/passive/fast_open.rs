//! TCP Fast Open at a listener (RFC 7413): whose text is taken before the handshake is done.

use core::hash::Hash;

use portolan_proto::control::FastOpenKeys;
use portolan_tcp::isn::Secret;
use portolan_tcp::{
    Connection, CookieVerdict, fast_open_cookie, judge_cookie, judge_shared_cookie, shared_cookie,
};
use portolan_types::Instant;

use super::{PassiveOpen, Segment, Terms};

/// `tcp_fastopen`: bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FastOpenUse(pub u32);

impl FastOpenUse {
    pub const NEVER: FastOpenUse = FastOpenUse(0);
    /// Linux's default.
    pub const ASKS: FastOpenUse = FastOpenUse(FastOpenUse::CLIENT);

    const CLIENT: u32 = 1;
    const SERVER: u32 = 2;
    const CLIENT_WITHOUT_COOKIE: u32 = 4;
    const SERVER_WITHOUT_COOKIE: u32 = 0x200;
    const ALL_LISTENERS: u32 = 0x400;

    fn has(self, bits: u32) -> bool {
        self.0 & bits == bits
    }

    /// May programs open with text?
    pub fn asks(self) -> bool {
        self.has(FastOpenUse::CLIENT)
    }

    /// May they also to peers that granted no cookie?
    pub fn asks_without_cookie(self) -> bool {
        self.has(FastOpenUse::CLIENT_WITHOUT_COOKIE)
    }

    /// May listeners take text?
    pub fn serves(self) -> bool {
        self.has(FastOpenUse::SERVER)
    }

    /// May they also from peers that bring no cookie?
    pub fn serves_without_cookie(self) -> bool {
        self.has(FastOpenUse::SERVER_WITHOUT_COOKIE)
    }

    /// Do they also without `TCP_FASTOPEN`?
    pub fn serves_everywhere(self) -> bool {
        self.has(FastOpenUse::SERVER | FastOpenUse::ALL_LISTENERS)
    }
}

/// What became of a SYN's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FastOpenOutcome {
    /// There is none to be had; a cookie may have been granted.
    Unused,
    /// Too many connections have their handshake undone.
    QueueFull,
    /// The cookie is none of ours.
    Refused,
    /// The application may have it at once.
    Accepted,
}

impl<Id: Copy + Eq + Hash> PassiveOpen<Id> {
    /// Linux's `tcp_try_fastopen`.
    pub(super) fn accept_fast(
        &self,
        now: Instant,
        syn: &Segment<'_>,
        terms: &Terms<'_, Id>,
        connection: &mut Connection,
    ) -> FastOpenOutcome {
        let everywhere = terms.fast_open.serves_everywhere();
        let backlog = everywhere.then(|| self.queue.limit());
        let Some(most) = self.options.fast_open_queue.or(backlog) else {
            return FastOpenOutcome::Unused;
        };
        let cookie = syn.header.options.fast_open.as_ref();
        if !terms.fast_open.serves() || (syn.payload.is_empty() && cookie.is_none()) {
            return FastOpenOutcome::Unused;
        }
        let unfinished = self.fast.iter().filter(|id| (terms.is_unfinished)(**id));
        if unfinished.count() >= most as usize {
            return FastOpenOutcome::QueueFull;
        }
        let proof = match cookie {
            _ if terms.fast_open.serves_without_cookie() => FastOpenOutcome::Accepted,
            Some(cookie) => self.prove(now, syn, cookie, terms.fast_open_secret, connection),
            None => FastOpenOutcome::Unused,
        };
        if proof == FastOpenOutcome::Accepted {
            connection.take_early(now, syn.payload);
        }
        proof
    }

    /// Has the peer received at its address before? If it needs a new cookie, it gets one.
    fn prove(
        &self,
        now: Instant,
        syn: &Segment<'_>,
        cookie: &[u8],
        secret: &Secret,
        connection: &mut Connection,
    ) -> FastOpenOutcome {
        let flow = &syn.flow;
        let (verdict, next) = match self.options.fast_open_keys {
            Some(FastOpenKeys { primary, backup }) => {
                let keys = [Some(primary), backup].into_iter().flatten();
                let keys: Vec<Secret> = keys.map(Secret).collect();
                let verdict = judge_shared_cookie(&keys, flow, cookie);
                (verdict, shared_cookie(&keys[0], flow))
            }
            None => (
                judge_cookie(secret, flow, cookie, now),
                fast_open_cookie(secret, flow, now),
            ),
        };
        if verdict != CookieVerdict::Good {
            connection.grant_cookie(next);
        }
        match verdict {
            CookieVerdict::Bad if cookie.is_empty() => FastOpenOutcome::Unused,
            CookieVerdict::Bad => FastOpenOutcome::Refused,
            _ => FastOpenOutcome::Accepted,
        }
    }
}
