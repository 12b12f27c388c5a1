//! Settings from the environment (`PORTOLAN` and the variables with that prefix).
//!
//! Read once, when the library is loaded: programs, and their children of fork, may change their
//! environment later. An invalid value is replaced by the default, and is reported once.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use portolan_proto::control::{Delivery, MappingChoice};
use portolan_sys::descriptor;

use crate::descriptors;

/// Whether sockets are Portolan's (`PORTOLAN`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Portolan if there is a server, else the kernel with one warning.
    #[default]
    Auto,
    /// Without a server, sockets fail.
    Require,
    Off,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Settings {
    pub(crate) mode: Mode,
    /// Absolute, because the program may change its directory.
    pub(crate) socket: Option<PathBuf>,
    pub(crate) spin_us: Option<u32>,
    /// How long calls wait for the next server.
    pub(crate) wait: Option<Duration>,
    pub(crate) delivery: Option<Delivery>,
    pub(crate) mapping: Option<MappingChoice>,
    pub(crate) delegates: Option<bool>,
    pub(crate) layers: Option<PathBuf>,
    /// One line for each invalid value.
    complaints: Vec<String>,
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();
static HAS_COMPLAINED: AtomicBool = AtomicBool::new(false);

/// Returns the settings of this process; the first call reads them.
pub(crate) fn settings() -> &'static Settings {
    SETTINGS.get_or_init(|| Settings::from_variables(|name| std::env::var_os(name)))
}

/// Reports invalid values, once for a process and its children of fork.
pub(crate) fn complain() {
    let complaints = &settings().complaints;
    if complaints.is_empty() || HAS_COMPLAINED.swap(true, Ordering::Relaxed) {
        return;
    }
    complaints
        .iter()
        .for_each(|complaint| complain_of(complaint));
}

/// Writes a line to standard error, unless that is a connection: servers that are started for each
/// connection (inetd, vsftpd) have it there, and the peer would take the line for a reply.
pub(crate) fn complain_of(complaint: &str) {
    let stderr = rustix::stdio::stderr();
    let is_connection =
        descriptors::is_ours(libc::STDERR_FILENO) || descriptor::is_network_socket(stderr);
    if !is_connection {
        let line = format!("portolan: {complaint}\n");
        // There is no place to report that the line could not be written.
        let _ = rustix::io::write(stderr, line.as_bytes());
    }
}

impl Settings {
    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Settings {
        let mut reader = Reader {
            variable,
            complaints: Vec::new(),
        };
        let mode = reader.word("PORTOLAN", "auto, require or off", mode);
        let spin_us = reader.word("PORTOLAN_SPIN", "a number of microseconds", |word| {
            word.parse().ok()
        });
        let wait = reader.word("PORTOLAN_WAIT", "a number of milliseconds", |word| {
            word.parse().ok().map(Duration::from_millis)
        });
        let names = Delivery::ALL.map(Delivery::name).join(", ");
        let delivery = reader.word("PORTOLAN_DELIVERY", &names, Delivery::from_name);
        let mapping = reader.word("PORTOLAN_DIRECT", "0 or 1", |word| {
            Some(if switch(word)? {
                MappingChoice::Direct
            } else {
                MappingChoice::Shared
            })
        });
        let delegates = reader.word("PORTOLAN_DELEGATE", "0 or 1", switch);
        Settings {
            mode: mode.unwrap_or_default(),
            socket: reader.path("PORTOLAN_SOCKET"),
            spin_us,
            wait,
            delivery,
            mapping,
            delegates,
            layers: reader.path("PORTOLAN_LAYERS"),
            complaints: reader.complaints,
        }
    }
}

fn mode(word: &str) -> Option<Mode> {
    Some(match word {
        "auto" => Mode::Auto,
        "require" => Mode::Require,
        "off" => Mode::Off,
        _ => return None,
    })
}

fn switch(word: &str) -> Option<bool> {
    match word {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

struct Reader<F> {
    variable: F,
    complaints: Vec<String>,
}

impl<F: Fn(&str) -> Option<OsString>> Reader<F> {
    /// An empty variable counts as unset.
    fn value(&self, name: &str) -> Option<OsString> {
        (self.variable)(name).filter(|value| !value.is_empty())
    }

    fn word<T>(
        &mut self,
        name: &str,
        expected: &str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Option<T> {
        let value = self.value(name)?;
        let parsed = value.to_str().map(str::trim).and_then(parse);
        if parsed.is_none() {
            self.complaints.push(complaint(name, &value, expected));
        }
        parsed
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        let path = PathBuf::from(self.value(name)?);
        Some(std::path::absolute(&path).unwrap_or(path))
    }
}

fn complaint(name: &str, value: &OsStr, expected: &str) -> String {
    format!("{name}={value:?} has no meaning and is ignored; it may be {expected}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Settings {
        Settings::from_variables(|name| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.into())
        })
    }

    #[test]
    fn without_variables_everything_is_the_default() {
        assert_eq!(of(&[]), Settings::default());
        assert_eq!(
            of(&[("PORTOLAN", ""), ("PORTOLAN_SPIN", "")]),
            Settings::default()
        );
    }

    #[test]
    fn variables_are_what_they_say() {
        let settings = of(&[
            ("PORTOLAN", "require"),
            ("PORTOLAN_SOCKET", "/run/x"),
            ("PORTOLAN_SPIN", "50"),
            ("PORTOLAN_DELIVERY", " ipc"),
            ("PORTOLAN_DIRECT", "1"),
            ("PORTOLAN_DELEGATE", "0"),
        ]);
        assert_eq!(settings.mode, Mode::Require);
        assert_eq!(settings.socket, Some("/run/x".into()));
        assert_eq!(settings.spin_us, Some(50));
        assert_eq!(settings.delivery, Delivery::from_name("ipc"));
        assert_eq!(settings.mapping, Some(MappingChoice::Direct));
        assert_eq!(settings.delegates, Some(false));
        assert!(settings.complaints.is_empty());
    }

    #[test]
    fn a_relative_path_outlives_a_change_of_directory() {
        assert!(
            of(&[("PORTOLAN_SOCKET", "x")])
                .socket
                .unwrap()
                .is_absolute()
        );
    }

    #[test]
    fn a_value_without_a_meaning_is_the_default_and_is_reported() {
        for (name, value) in [
            ("PORTOLAN", "requrie"),
            ("PORTOLAN_SPIN", "-1"),
            ("PORTOLAN_SPIN", "many"),
            ("PORTOLAN_DELIVERY", "pigeon"),
            ("PORTOLAN_DIRECT", "yes"),
            ("PORTOLAN_DELEGATE", "2"),
        ] {
            let mut settings = of(&[(name, value)]);
            let complaints = std::mem::take(&mut settings.complaints);
            assert_eq!(complaints.len(), 1, "{name}");
            assert!(complaints[0].starts_with(&format!("{name}=\"{value}\"")));
            assert_eq!(settings, Settings::default());
        }
    }
}
