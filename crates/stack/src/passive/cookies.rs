//! SYN cookies: when one is looked for, what is made of one, and what a SYN is answered with.

use core::time::Duration;

use portolan_proto::control::HandshakeOptions;
use portolan_tcp::cookie::{self, Decoded};
use portolan_tcp::isn::Secret;
use portolan_tcp::{Config, Connection, ListenAnswer, judge_at_listener};
use portolan_types::{FlowKey, Instant};
use portolan_wire::tcp::{TcpFlags, TcpHeader};

use super::Segment;

/// Twice the age at which the engine refuses a cookie.
pub const COOKIE_LIFETIME: Duration = Duration::from_secs(240);

/// What a segment without a session wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// Nothing that is answered.
    Noise,
    Syn,
    /// It returns a cookie.
    Cookie(Decoded),
    /// It acknowledges what nobody sent; while cookies are about, it may be a guess at one.
    Stray {
        is_forgery: bool,
    },
}

/// When cookies were sent last: acknowledgements are looked at for them only then.
#[derive(Clone, Copy, Debug, Default)]
pub struct CookieClock(Option<Instant>);

impl CookieClock {
    /// Others make cookies, too.
    pub const ALWAYS: CookieClock = CookieClock(Some(Instant::FAR_FUTURE));

    pub fn note(&mut self, now: Instant) {
        self.0 = Some(now);
    }

    fn is_running(self, now: Instant) -> bool {
        self.0.is_some_and(|last| now.since(last) < COOKIE_LIFETIME)
    }

    /// Judges a segment by the secret that cookies of the port are made with.
    pub(super) fn judge(
        self,
        now: Instant,
        flow: &FlowKey,
        header: &TcpHeader,
        secret: &Secret,
    ) -> Request {
        match judge_at_listener(header) {
            ListenAnswer::Ignore => Request::Noise,
            ListenAnswer::Open => Request::Syn,
            ListenAnswer::Reset if is_plain_ack(header) && self.is_running(now) => {
                let decoded = cookie::decode(secret, flow, header, now);
                decoded.map_or(Request::Stray { is_forgery: true }, Request::Cookie)
            }
            ListenAnswer::Reset => Request::Stray { is_forgery: false },
        }
    }
}

/// What the options mean for the answer by cookie and for the connection that may come of it.
pub fn clamp_for_cookie(config: Config, options: &HandshakeOptions) -> Config {
    Config {
        mss: options
            .max_segment
            .map_or(config.mss, |clamp| clamp.min(config.mss)),
        ..config
    }
}

/// A connection that a cookie opens, with what came along. Its events are the caller's to know.
pub(super) fn open_by_cookie(
    config: &Config,
    decoded: &Decoded,
    segment: &Segment<'_>,
    now: Instant,
) -> Connection {
    let mut connection = Connection::accept_cookie(config, segment.header, decoded, now);
    connection.on_segment(now, segment.header, segment.payload);
    connection.events();
    connection
}

fn is_plain_ack(header: &TcpHeader) -> bool {
    let others = TcpFlags::SYN.with(TcpFlags::RST);
    header.flags.contains(TcpFlags::ACK) && header.flags.0 & others.0 == 0
}

#[cfg(test)]
mod tests {
    use portolan_types::{Protocol, SeqNum};

    use super::*;

    const NOW: Instant = Instant::from_millis(60_000);
    const SECRET: Secret = Secret([1; 16]);

    fn flow() -> FlowKey {
        FlowKey {
            protocol: Protocol::Tcp,
            local: ([10, 0, 0, 1], 80).into(),
            remote: ([10, 0, 0, 2], 1234).into(),
        }
    }

    fn segment(flags: TcpFlags) -> TcpHeader {
        TcpHeader {
            source_port: 1234,
            destination_port: 80,
            seq: SeqNum(1000),
            flags,
            ..TcpHeader::default()
        }
    }

    fn acknowledgement_of(secret: &Secret) -> TcpHeader {
        let syn = segment(TcpFlags::SYN);
        let answer = cookie::syn_ack(secret, &flow(), &syn, &Config::default(), NOW);
        TcpHeader {
            seq: syn.seq + 1,
            ack: answer.seq + 1,
            ..segment(TcpFlags::ACK)
        }
    }

    fn running() -> CookieClock {
        let mut clock = CookieClock::default();
        clock.note(NOW);
        clock
    }

    #[test]
    fn a_cookie_of_the_ports_secret_is_known() {
        let ack = acknowledgement_of(&SECRET);
        let segment = running().judge(NOW, &flow(), &ack, &SECRET);
        assert!(matches!(segment, Request::Cookie(_)), "{segment:?}");
        let ack = acknowledgement_of(&Secret([3; 16]));
        let segment = running().judge(NOW, &flow(), &ack, &SECRET);
        assert_eq!(segment, Request::Stray { is_forgery: true });
    }

    #[test]
    fn without_cookies_about_an_acknowledgement_is_no_forgery() {
        let ack = acknowledgement_of(&SECRET);
        let stray = Request::Stray { is_forgery: false };
        let never = CookieClock::default().judge(NOW, &flow(), &ack, &SECRET);
        assert_eq!(never, stray);
        let later = NOW + COOKIE_LIFETIME;
        assert_eq!(running().judge(later, &flow(), &ack, &SECRET), stray);
    }

    #[test]
    fn a_syn_opens_and_a_reset_is_noise() {
        let judge = |flags| running().judge(NOW, &flow(), &segment(flags), &SECRET);
        assert_eq!(judge(TcpFlags::SYN), Request::Syn);
        assert_eq!(judge(TcpFlags::RST), Request::Noise);
    }
}
