//! Names of ports, from services(5).

use std::collections::HashMap;
use std::fs;

use portolan_types::Protocol;

#[derive(Default)]
pub(super) struct Services {
    names: HashMap<(u16, Protocol), String>,
    ports: HashMap<String, u16>,
}

impl Services {
    /// Reads the names of this host; there are none if the file does not exist.
    pub(super) fn read() -> Services {
        fs::read_to_string("/etc/services")
            .map_or_else(|_| Services::default(), |text| Services::of(&text))
    }

    pub(super) fn of(text: &str) -> Services {
        let mut services = Services::default();
        for line in text.lines() {
            services.add(line.split('#').next().unwrap_or(""));
        }
        services
    }

    /// Parses a line such as `http 80/tcp www`.
    fn add(&mut self, line: &str) -> Option<()> {
        let mut words = line.split_whitespace();
        let name = words.next()?;
        let (port, protocol) = words.next()?.split_once('/')?;
        let port = port.parse().ok()?;
        let protocol = match protocol {
            "tcp" => Protocol::Tcp,
            "udp" => Protocol::Udp,
            _ => return None,
        };
        self.names
            .entry((port, protocol))
            .or_insert_with(|| name.to_owned());
        for name in [name].into_iter().chain(words) {
            self.ports.entry(name.to_owned()).or_insert(port);
        }
        Some(())
    }

    pub(super) fn port(&self, name: &str) -> Option<u16> {
        self.ports.get(name).copied()
    }

    pub(super) fn name(&self, protocol: Protocol, port: u16) -> Option<&str> {
        self.names.get(&(port, protocol)).map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_name_is_shown_and_all_are_understood() {
        let services =
            Services::of("# comment\nhttp\t80/tcp www # web\ndomain 53/udp\nodd 1/ddp\n");
        assert_eq!(services.name(Protocol::Tcp, 80), Some("http"));
        assert_eq!(services.name(Protocol::Udp, 80), None);
        assert_eq!(services.port("www"), Some(80));
        assert_eq!(services.port("odd"), None);
    }
}
