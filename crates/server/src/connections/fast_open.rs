//! TCP Fast Open (RFC 7413) of active opens: cookies granted by peers, by destination.

use std::net::IpAddr;

use portolan_control::Errno;
use portolan_proto::control::FastOpenMode;
use portolan_tcp::{Connection, FastOpen, GrantedCookie};

use crate::server::Server;

/// Number of destinations whose cookies are kept.
const DESTINATIONS: usize = 1024;

/// Maximum early data that the server takes: more never fits a SYN.
const EARLY_MAX: usize = 1460;

impl Server {
    pub(crate) fn has_cookie(&self, remote: IpAddr) -> bool {
        self.fast_cookies.contains_key(&remote)
    }

    /// Keeps a cookie with its parameters; at the limit another one is removed.
    pub(crate) fn keep_cookie(&mut self, remote: IpAddr, cookie: GrantedCookie) {
        if self.fast_cookies.len() >= DESTINATIONS
            && !self.has_cookie(remote)
            && let Some(other) = self.fast_cookies.keys().next().copied()
        {
            self.fast_cookies.remove(&other);
        }
        self.fast_cookies.insert(remote, cookie);
    }

    /// Returns whether an active open waits until the application has data for its SYN. `has_way`
    /// tells whether the path could carry it.
    pub(crate) fn defers_open(
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

    /// Prepares an active open with the application's Fast Open mode. Returns how many bytes of its
    /// data were taken.
    pub(crate) fn open_fast(
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
}
