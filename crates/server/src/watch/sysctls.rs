//! Kernel parameters that Portolan honours: everything by which a peer could tell the two stacks apart, and who may
//! bind which ports. The configuration file takes precedence; buffer sizes and the congestion controller are
//! Portolan's own and configured only there.

use std::time::Duration;

use portolan_stack::passive::{CookieUse, FastOpenUse};
use portolan_sys::sysctl::Parameter;
use portolan_tcp::EcnMode;
use portolan_types::Instant;
use tracing::warn;

/// How long a change may go unnoticed.
const FRESH: Duration = Duration::from_millis(20);

/// The parameters and their meaning. `docs/reference/configuration.md` lists them.
const HONOURED: [Honoured; 9] = [
    Honoured {
        name: "net/ipv4/tcp_ecn",
        take: |values, number| {
            values.ecn = match number {
                0 => EcnMode::Off,
                1 => EcnMode::Request,
                // Modes of requesting ECN that Portolan does not know at least accept it.
                _ => EcnMode::Accept,
            };
        },
    },
    Honoured {
        name: "net/ipv4/tcp_fastopen",
        take: |values, number| {
            values.fast_open = FastOpenUse(number);
        },
    },
    Honoured {
        name: "net/ipv4/tcp_syncookies",
        take: |values, number| {
            values.cookies = match number {
                0 => CookieUse::Never,
                1 => CookieUse::WhenFull,
                _ => CookieUse::Always,
            };
        },
    },
    Honoured {
        name: "net/ipv4/tcp_timestamps",
        take: |values, number| {
            values.timestamps = number != 0;
        },
    },
    Honoured {
        name: "net/ipv4/tcp_sack",
        take: |values, number| {
            values.sack = number != 0;
        },
    },
    Honoured {
        name: "net/ipv4/tcp_window_scaling",
        take: |values, number| {
            values.window_scaling = number != 0;
        },
    },
    Honoured {
        name: "net/ipv4/tcp_syn_retries",
        take: |values, number| {
            values.syn_retries = retries(number);
        },
    },
    Honoured {
        name: "net/ipv4/tcp_synack_retries",
        take: |values, number| {
            values.syn_ack_retries = retries(number);
        },
    },
    Honoured {
        name: "net/ipv4/ip_unprivileged_port_start",
        take: |values, number| {
            values.first_unprivileged_port = number;
        },
    },
];

/// A parameter, and the meaning of its value.
#[derive(Clone, Copy, Debug)]
struct Honoured {
    name: &'static str,
    take: fn(&mut Values, u32),
}

/// The kernel itself accepts at most 127 and 255.
fn retries(number: u32) -> u8 {
    u8::try_from(number).unwrap_or(u8::MAX)
}

/// The values of the parameters; the defaults are Linux's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Values {
    pub ecn: EcnMode,
    pub fast_open: FastOpenUse,
    pub cookies: CookieUse,
    pub timestamps: bool,
    pub sack: bool,
    pub window_scaling: bool,
    pub syn_retries: u8,
    pub syn_ack_retries: u8,
    /// The kernel accepts 65536, too: then no port is unprivileged.
    pub first_unprivileged_port: u32,
}

impl Default for Values {
    fn default() -> Values {
        Values {
            ecn: EcnMode::Accept,
            fast_open: FastOpenUse::ASKS,
            cookies: CookieUse::WhenFull,
            timestamps: true,
            sack: true,
            window_scaling: true,
            syn_retries: 6,
            syn_ack_retries: 5,
            first_unprivileged_port: 1024,
        }
    }
}

/// The parameters of the server's namespace. The kernel does not report changes, so they are read when needed.
#[derive(Debug)]
pub(crate) struct Sysctls {
    files: Vec<(Parameter, Honoured)>,
    looked: Instant,
    values: Values,
}

impl Sysctls {
    /// Opens the parameters that this kernel has.
    pub(crate) fn open(now: Instant) -> Sysctls {
        let open = |honoured: Honoured| match Parameter::open(honoured.name) {
            Ok(file) => Some((file, honoured)),
            Err(error) => {
                warn!(%error, "Linux's default is taken");
                None
            }
        };
        let mut sysctls = Sysctls {
            files: HONOURED.into_iter().filter_map(open).collect(),
            looked: now,
            values: Values::default(),
        };
        sysctls.look(now);
        sysctls
    }

    /// Returns the values last read.
    pub(crate) fn values(&self) -> Values {
        self.values
    }

    /// Reads them now. A parameter that cannot be read keeps its value.
    pub(crate) fn look(&mut self, now: Instant) {
        self.looked = now;
        for (file, honoured) in &self.files {
            if let Ok(number) = file.number() {
                (honoured.take)(&mut self.values, number);
            }
        }
    }

    /// Reads them if the last read is too old.
    pub(crate) fn refresh(&mut self, now: Instant) {
        if now.since(self.looked) >= FRESH {
            self.look(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = include_str!("../../../../docs/reference/configuration.md");

    fn taken(name: &str, number: u32) -> Values {
        let mut values = Values::default();
        let honoured = HONOURED
            .iter()
            .find(|honoured| honoured.name.ends_with(name))
            .expect("it is honoured");
        (honoured.take)(&mut values, number);
        values
    }

    #[test]
    fn the_page_lists_every_parameter_and_no_other() {
        let listed: Vec<&str> = PAGE
            .lines()
            .filter_map(|line| line.strip_prefix("| `net.ipv4.")?.split('`').next())
            .collect();
        let honoured: Vec<&str> = HONOURED
            .iter()
            .filter_map(|honoured| honoured.name.rsplit('/').next())
            .collect();
        assert_eq!(listed, honoured);
    }

    #[test]
    fn what_linux_has_by_default_changes_nothing() {
        let defaults = [
            ("tcp_ecn", 2),
            ("tcp_fastopen", 1),
            ("tcp_syncookies", 1),
            ("tcp_timestamps", 1),
            ("tcp_sack", 1),
            ("tcp_window_scaling", 1),
            ("tcp_syn_retries", 6),
            ("tcp_synack_retries", 5),
            ("ip_unprivileged_port_start", 1024),
        ];
        for (name, number) in defaults {
            assert_eq!(taken(name, number), Values::default(), "{name}");
        }
    }

    #[test]
    fn each_parameter_says_what_ip_sysctl_says_it_does() {
        assert_eq!(taken("tcp_ecn", 0).ecn, EcnMode::Off);
        assert_eq!(taken("tcp_ecn", 1).ecn, EcnMode::Request);
        assert_eq!(taken("tcp_syncookies", 0).cookies, CookieUse::Never);
        assert_eq!(taken("tcp_syncookies", 2).cookies, CookieUse::Always);
        assert!(!taken("tcp_timestamps", 0).timestamps);
        assert!(taken("tcp_timestamps", 2).timestamps);
        assert!(!taken("tcp_sack", 0).sack);
        assert!(!taken("tcp_window_scaling", 0).window_scaling);
        assert_eq!(taken("tcp_syn_retries", 2).syn_retries, 2);
        assert_eq!(taken("tcp_synack_retries", 1000).syn_ack_retries, 255);
        let start = taken("ip_unprivileged_port_start", 1 << 16).first_unprivileged_port;
        assert_eq!(start, 1 << 16);
    }

    #[test]
    fn fast_open_is_a_word_of_bits() {
        let of = |number| taken("tcp_fastopen", number).fast_open;
        assert!(!of(0).asks() && !of(0).serves());
        assert!(of(2).serves() && !of(2).asks() && !of(2).serves_without_cookie());
        assert!(of(0x203).serves_without_cookie() && !of(0x203).serves_everywhere());
        assert!(of(0x402).serves_everywhere() && !of(0x400).serves_everywhere());
        assert!(of(5).asks_without_cookie() && !of(1).asks_without_cookie());
    }
}
