//! Protocols that programs run themselves, among the sessions of `portolan ss`.

use portolan_proto::raw::Guard;
use portolan_proto::report::RawReport;
use portolan_types::Protocol;

use super::shown;

/// In the columns of sessions: the guard stands where they have their endpoint.
pub fn cells(flow: &RawReport) -> Vec<String> {
    let (netid, local) = match flow.guard {
        Guard::EtherType(number) => ("eth", format!("{number:#06x}")),
        Guard::IpProtocol(number) => ("ip", number.to_string()),
        Guard::Port { protocol, local } => match protocol {
            Protocol::Tcp => ("tcp", local.to_string()),
            Protocol::Udp => ("udp", local.to_string()),
        },
    };
    vec![
        netid.to_owned(),
        "RAW".to_owned(),
        flow.figures.receive_queue.to_string(),
        "0".to_owned(),
        local,
        "*".to_owned(),
        shown(&flow.holder),
    ]
}

pub fn figures(flow: &RawReport) -> String {
    let figures = &flow.figures;
    format!(
        "bytes_sent:{} bytes_received:{} frames_out:{} frames_in:{} dropped:{} uid:{} channel:{}",
        figures.bytes_out,
        figures.bytes_in,
        figures.frames_out,
        figures.frames_in,
        figures.dropped,
        flow.uid,
        flow.channel,
    )
}

/// With the keys that sessions have, where they mean the same.
pub fn json(flow: &RawReport) -> serde_json::Value {
    let (protocol, local) = match flow.guard {
        Guard::EtherType(_) => ("Ethernet", None),
        Guard::IpProtocol(_) => ("Ip", None),
        Guard::Port { protocol, local } => match protocol {
            Protocol::Tcp => ("Tcp", Some(local)),
            Protocol::Udp => ("Udp", Some(local)),
        },
    };
    let number = match flow.guard {
        Guard::EtherType(number) => number,
        Guard::IpProtocol(number) => number.into(),
        Guard::Port { local, .. } => local.port(),
    };
    serde_json::json!({
        "protocol": protocol,
        "local": local,
        "remote": null,
        "state": "RAW",
        "guard": { "text": flow.guard.to_string(), "number": number },
        "holder": flow.holder,
        "uid": flow.uid,
        "channel": flow.channel,
        "figures": flow.figures,
    })
}

#[cfg(test)]
mod tests {
    use portolan_proto::report::{Holder, RawFigures};

    use super::*;

    fn flow(guard: Guard) -> RawReport {
        RawReport {
            guard,
            holder: Holder::Process {
                pid: 42,
                program: "messages\u{7}".into(),
            },
            uid: 7,
            channel: 3,
            figures: RawFigures {
                frames_in: 5,
                dropped: 2,
                receive_queue: 120,
                ..RawFigures::default()
            },
        }
    }

    #[test]
    fn a_flow_of_each_kind_shows_what_guards_it() {
        let at = "[::]:7".parse().unwrap();
        let port = |protocol| Guard::Port {
            protocol,
            local: at,
        };
        for (guard, netid, local, protocol, number) in [
            (
                Guard::EtherType(0x88b5),
                "eth",
                "0x88b5",
                "Ethernet",
                0x88b5,
            ),
            (Guard::IpProtocol(253), "ip", "253", "Ip", 253),
            (port(Protocol::Tcp), "tcp", "[::]:7", "Tcp", 7),
            (port(Protocol::Udp), "udp", "[::]:7", "Udp", 7),
        ] {
            let flow = flow(guard);
            let expected = [netid, "RAW", "120", "0", local, "*", "42,messages?"];
            assert_eq!(cells(&flow), expected);
            let value = json(&flow);
            assert_eq!(value["protocol"], protocol);
            assert_eq!(value["guard"]["number"], number);
            assert_eq!(value["figures"]["frames_in"], 5);
        }
    }

    #[test]
    fn its_figures_name_its_channel_and_what_was_dropped() {
        let line = figures(&flow(Guard::IpProtocol(253)));
        assert!(
            line.ends_with("frames_in:5 dropped:2 uid:7 channel:3"),
            "{line}"
        );
    }
}
