//! TCP Fast Open (RFC 7413): cookies that peers granted, kept by destination, and cookies granted
//! to peers of listeners that want it.

use std::net::IpAddr;

use portolan_control::Errno;
use portolan_proto::control::{FastOpenKeys, FastOpenMode};
use portolan_tcp::isn::Secret;
use portolan_tcp::{
    Connection, CookieVerdict, FastOpen, GrantedCookie, StateName, fast_open_cookie, judge_cookie,
    judge_shared_cookie, shared_cookie,
};
use portolan_types::{FlowKey, SessionId};
use portolan_wire::tcp::TcpHeader;

use crate::server::Server;

/// Destinations whose cookies are kept.
const DESTINATIONS: usize = 1024;

/// What of an early text the server takes at most: more never fits a SYN.
const EARLY_MAX: usize = 1460;

impl Server {
    pub fn has_cookie(&self, remote: IpAddr) -> bool {
        self.fast_cookies.contains_key(&remote)
    }

    /// Keeps a cookie with what came with it; some other goes if there are too many.
    pub fn keep_cookie(&mut self, remote: IpAddr, cookie: GrantedCookie) {
        if self.fast_cookies.len() >= DESTINATIONS
            && !self.has_cookie(remote)
            && let Some(other) = self.fast_cookies.keys().next().copied()
        {
            self.fast_cookies.remove(&other);
        }
        self.fast_cookies.insert(remote, cookie);
    }

    /// Does an active open wait until the application has text for its SYN? `has_way` tells if that
    /// could take it.
    pub fn defers_open(
        &mut self,
        early: &FastOpenMode,
        has_way: impl FnOnce(&Server) -> bool,
    ) -> Result<bool, Errno> {
        self.sysctls.refresh(self.now);
        let asks = self.sysctls.values().fast_open.asks();
        match early {
            FastOpenMode::Payload { .. } if !asks => Err(Errno::OPNOTSUPP),
            FastOpenMode::IfCookie => Ok(asks && has_way(self)),
            FastOpenMode::Payload { .. } | FastOpenMode::No => Ok(false),
        }
    }

    /// Prepares an active open as the application wants it. Returns the bytes of its text that
    /// were taken.
    pub fn open_fast(
        &mut self,
        connection: &mut Connection,
        remote: IpAddr,
        early: &FastOpenMode,
    ) -> u32 {
        let (text, cookieless, waits): (&[u8], _, _) = match early {
            FastOpenMode::No => return 0,
            FastOpenMode::IfCookie => (&[], false, false),
            FastOpenMode::Payload {
                bytes,
                cookieless,
                waits,
            } => (bytes, *cookieless, *waits),
        };
        let sysctl = self.sysctls.values().fast_open;
        if !sysctl.asks() {
            return 0;
        }
        let how = match self.fast_cookies.get(&remote) {
            Some(cookie) => FastOpen::With(cookie.clone()),
            None if cookieless || sysctl.asks_without_cookie() => FastOpen::WithoutCookie,
            None => FastOpen::Ask,
        };
        let asks = how == FastOpen::Ask;
        connection.open_fast(how);
        if asks {
            if waits {
                connection.expect_text();
            }
            return 0;
        }
        self.control.counters.fast_opens += 1;
        let text = &text[..text.len().min(EARLY_MAX)];
        connection.send(self.now, text) as u32
    }

    /// Fast Open for the SYN of a connection to a listener: true if its text was taken and the
    /// application may have it at once (Linux's `tcp_try_fastopen`).
    pub fn accept_fast(
        &mut self,
        listener_id: SessionId,
        flow: &FlowKey,
        (header, payload): (&TcpHeader, &[u8]),
        connection: &mut Connection,
    ) -> bool {
        let sysctl = self.sysctls.values().fast_open;
        let cookie = header.options.fast_open.as_ref();
        let Some(queue) = self.fast_open_queue(listener_id) else {
            return false;
        };
        if !sysctl.serves() || (payload.is_empty() && cookie.is_none()) {
            return false;
        }
        if self.fast_unfinished(listener_id) >= queue as usize {
            self.control.counters.fast_open_overflow += 1;
            return false;
        }
        let is_proved = sysctl.serves_without_cookie()
            || cookie.is_some_and(|cookie| self.is_proved(listener_id, flow, cookie, connection));
        if is_proved {
            self.control.counters.fast_accepts += 1;
            connection.take_early(self.now, payload);
        }
        is_proved
    }

    /// How many connections may wait with their handshake undone.
    fn fast_open_queue(&self, listener_id: SessionId) -> Option<u32> {
        let listener = self.control.registry.listener(listener_id)?;
        let everywhere = self.sysctls.values().fast_open.serves_everywhere();
        let backlog = everywhere.then(|| listener.backlog());
        listener.options.fast_open_queue.or(backlog)
    }

    /// Has the peer received at its address before? If it needs a new cookie, it gets one.
    fn is_proved(
        &mut self,
        listener_id: SessionId,
        flow: &FlowKey,
        cookie: &[u8],
        connection: &mut Connection,
    ) -> bool {
        let listener = self.control.registry.listener(listener_id);
        let keys = listener.and_then(|listener| listener.options.fast_open_keys);
        let (verdict, next) = match keys {
            Some(FastOpenKeys { primary, backup }) => {
                let keys: Vec<Secret> = [Some(primary), backup]
                    .into_iter()
                    .flatten()
                    .map(Secret)
                    .collect();
                let verdict = judge_shared_cookie(&keys, flow, cookie);
                (verdict, shared_cookie(&keys[0], flow))
            }
            None => (
                judge_cookie(&self.secret, flow, cookie, self.now),
                fast_open_cookie(&self.secret, flow, self.now),
            ),
        };
        if verdict != CookieVerdict::Good {
            connection.grant_cookie(next);
        }
        if verdict == CookieVerdict::Bad {
            self.control.counters.fast_open_refused += u64::from(!cookie.is_empty());
            return false;
        }
        true
    }

    /// Connections of the listener whose text was taken before their handshake is done.
    fn fast_unfinished(&mut self, listener_id: SessionId) -> usize {
        let Some(listener) = self.control.registry.listener_mut(listener_id) else {
            return 0;
        };
        let mut unfinished = std::mem::take(&mut listener.fast);
        unfinished.retain(|id| {
            self.server_slot(*id)
                .and_then(|slot| self.stack.tcp(slot))
                .is_some_and(|session| session.connection.state() == StateName::SynReceived)
        });
        let count = unfinished.len();
        if let Some(listener) = self.control.registry.listener_mut(listener_id) {
            listener.fast = unfinished;
        }
        count
    }
}
