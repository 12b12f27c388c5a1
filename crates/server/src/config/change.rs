//! The differences between two configurations, and which of them a running server can apply.

use super::Config;

/// A key whose value differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    pub key: &'static str,
    /// Why the change needs a restart.
    pub refusal: Option<&'static str>,
}

const DEVICES: &str = "devices get the packet filter at the start";
const SOCKET: &str = "programs know the server by its socket";
const PORTS: &str = "the kernel's ports were reserved at the start";
const CHANNELS: &str = "channels are made with it";
const TABLES: &str = "the filter's tables have that size";
const FILTERS: &str = "the filters are loaded with it";
const GUARANTEES: &str = "guarantees are made at the start; `portolan qos` changes them";
const EXTENSIONS: &str = "extensions are checked by it from the start on";

impl Config {
    /// Returns the keys whose values differ in `next`.
    pub(crate) fn changes(&self, next: &Config) -> Vec<Change> {
        let (a, b) = (self, next);
        let (la, lb) = (&a.limits, &b.limits);
        let (da, db) = (&a.delivery, &b.delivery);
        let is_other_form = da.form != db.form || da.mapping != db.mapping;
        let tables = |of: &super::LimitsConfig| [of.processes, of.bindings, of.shared_ports];
        let same_tables = super::LimitsConfig {
            processes: lb.processes,
            bindings: lb.bindings,
            shared_ports: lb.shared_ports,
            ..*la
        };
        let same_forms = super::DeliveryConfig {
            form: db.form,
            mapping: db.mapping,
            ..*da
        };
        [
            ("interfaces", a.interfaces != b.interfaces, Some(DEVICES)),
            ("socket", a.socket != b.socket, Some(SOCKET)),
            ("socket_mode", a.socket_mode != b.socket_mode, None),
            ("socket_group", a.socket_group != b.socket_group, None),
            (
                "ephemeral_ports",
                a.ephemeral_ports != b.ephemeral_ports,
                Some(PORTS),
            ),
            ("ring_size", a.ring_size != b.ring_size, Some(CHANNELS)),
            ("spin_us", a.spin_us != b.spin_us, None),
            ("congestion", a.congestion != b.congestion, None),
            ("ecn", a.ecn != b.ecn, None),
            ("host_policy", a.host_policy != b.host_policy, None),
            ("buffers", a.buffers != b.buffers, None),
            (
                "limits.processes, bindings or shared_ports",
                tables(la) != tables(lb),
                Some(TABLES),
            ),
            ("limits", same_tables != *lb, None),
            ("filter", a.filter != b.filter, Some(FILTERS)),
            ("demux", a.demux != b.demux, Some(FILTERS)),
            ("delivery.form or mapping", is_other_form, None),
            ("delivery", same_forms != *db, Some(CHANNELS)),
            ("qos", a.qos != b.qos, Some(GUARANTEES)),
            ("raw", a.raw != b.raw, None),
            ("extension", a.extension != b.extension, Some(EXTENSIONS)),
            ("delegation", a.delegation != b.delegation, None),
        ]
        .into_iter()
        .filter(|(_, is_other, _)| *is_other)
        .map(|(key, _, refusal)| Change { key, refusal })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn each_key_that_differs_is_named_with_why_it_stays() {
        let before = config("interfaces = [\"a\"]");
        assert_eq!(before.changes(&before), []);
        let next = config(
            "interfaces = [\"b\"]\ncongestion = \"bbr\"\n[limits]\nsessions = 7\nprocesses = 8\n\
             [delivery]\nform = \"ipc\"\n",
        );
        let change = |key, refusal| Change { key, refusal };
        assert_eq!(
            before.changes(&next),
            [
                change("interfaces", Some(DEVICES)),
                change("congestion", None),
                change("limits.processes, bindings or shared_ports", Some(TABLES)),
                change("limits", None),
                change("delivery.form or mapping", None),
            ]
        );
    }
}
