//! Protocols that programs implement themselves, among the sessions of `portolan ss`.

use portolan_proto::raw::Guard;
use portolan_proto::report::RawReport;
use schemars::JsonSchema;
use serde::Serialize;

use super::{Place, SocketView};
use crate::json;

/// A protocol of a program's own.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub(crate) struct RawView {
    /// In the syntax of commands and of the configuration.
    pub guard: String,
    /// The EtherType, IP protocol or port.
    pub number: u16,
    pub channel: u32,
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub frames_in: u64,
    pub frames_out: u64,
    /// Frames dropped because too many were unread.
    pub dropped: u64,
}

pub(super) fn view(flow: &RawReport) -> SocketView {
    let (protocol, number, place) = match flow.guard {
        Guard::EtherType(number) => ("ethernet", number, Place::default()),
        Guard::IpProtocol(number) => ("ip", number.into(), Place::default()),
        Guard::Port { protocol, local } => {
            let place = Place::of(protocol, local, None);
            (json::protocol(protocol), local.port(), place)
        }
    };
    SocketView {
        receive_queue: flow.figures.receive_queue,
        holder: Some((&flow.holder).into()),
        uid: flow.uid,
        raw: Some(RawView {
            guard: flow.guard.to_string(),
            number,
            channel: flow.channel,
            bytes_in: flow.figures.bytes_in,
            bytes_out: flow.figures.bytes_out,
            frames_in: flow.figures.frames_in,
            frames_out: flow.figures.frames_out,
            dropped: flow.figures.dropped,
        }),
        ..SocketView::bare("portolan", protocol, "RAW", place)
    }
}

#[cfg(test)]
mod tests {
    use portolan_proto::report::{Holder, RawFigures};
    use portolan_types::Protocol;

    use super::*;

    #[test]
    fn a_flow_of_each_kind_shows_what_guards_it() {
        let local = "[::]:7".parse().unwrap();
        let port = |protocol| Guard::Port { protocol, local };
        for (guard, protocol, number, text) in [
            (Guard::EtherType(0x88b5), "ethernet", 0x88b5, None),
            (Guard::IpProtocol(253), "ip", 253, None),
            (port(Protocol::Tcp), "tcp", 7, Some("[::]:7")),
            (port(Protocol::Udp), "udp", 7, Some("[::]:7")),
        ] {
            let view = view(&RawReport {
                guard,
                holder: Holder::Server,
                uid: 7,
                channel: 3,
                figures: RawFigures {
                    receive_queue: 120,
                    ..RawFigures::default()
                },
            });
            assert_eq!((view.protocol, view.local.as_deref()), (protocol, text));
            assert_eq!((view.state.as_str(), view.receive_queue), ("RAW", 120));
            assert_eq!(view.raw.unwrap().number, number);
        }
    }
}
