//! `portolan ss -s`: numbers of sessions, in the summary of ss(8).

use schemars::JsonSchema;
use serde::Serialize;

use super::SocketView;
use crate::exit::{Failure, print};
use crate::json::print_json;

#[derive(Debug, Default, PartialEq, Serialize, JsonSchema)]
struct CountView {
    total: usize,
    ipv4: usize,
    ipv6: usize,
}

/// Numbers of sessions.
#[derive(Debug, Default, PartialEq, Serialize, JsonSchema)]
pub(crate) struct SummaryView {
    total: usize,
    established: usize,
    closed: usize,
    time_wait: usize,
    raw: CountView,
    udp: CountView,
    tcp: CountView,
}

pub(super) fn show(sockets: &[SocketView], as_json: bool) -> Result<(), Failure> {
    let summary = of(sockets);
    if as_json {
        return print_json(&summary);
    }
    for line in text(&summary) {
        print(line)?;
    }
    Ok(())
}

fn of(sockets: &[SocketView]) -> SummaryView {
    let mut summary = SummaryView {
        total: sockets.len(),
        ..SummaryView::default()
    };
    for socket in sockets {
        let count = match (&socket.raw, socket.protocol) {
            (Some(_), _) => &mut summary.raw,
            (None, "udp") => &mut summary.udp,
            _ => &mut summary.tcp,
        };
        count.total += 1;
        if socket.place.is_ipv6 {
            count.ipv6 += 1
        } else {
            count.ipv4 += 1
        }
        match (socket.protocol, socket.state.as_str()) {
            ("tcp", "ESTAB") => summary.established += 1,
            ("tcp", "TIME-WAIT") => summary.time_wait += 1,
            ("tcp", "CLOSED" | "UNCONN") => summary.closed += 1,
            _ => {}
        }
    }
    summary
}

fn text(summary: &SummaryView) -> Vec<String> {
    let row = |name: &str, count: &CountView| {
        format!(
            "{name:<9} {:<9} {:<9} {}",
            count.total, count.ipv4, count.ipv6
        )
    };
    vec![
        format!("Total: {}", summary.total),
        format!(
            "TCP:   {} (estab {}, closed {}, timewait {})",
            summary.tcp.total, summary.established, summary.closed, summary.time_wait
        ),
        String::new(),
        format!("{:<9} {:<9} {:<9} IPv6", "Transport", "Total", "IP"),
        row("RAW", &summary.raw),
        row("UDP", &summary.udp),
        row("TCP", &summary.tcp),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::session::tests::{established, listening, unconnected};
    use super::super::session::view;
    use super::*;

    #[test]
    fn sessions_are_counted_by_protocol_family_and_state() {
        let summary = of(&[
            view(&established()),
            view(&listening()),
            view(&unconnected()),
        ]);
        assert_eq!((summary.total, summary.established), (3, 1));
        assert_eq!(
            summary.tcp,
            CountView {
                total: 2,
                ipv4: 2,
                ipv6: 0
            }
        );
        assert_eq!(
            text(&summary)[1],
            "TCP:   2 (estab 1, closed 0, timewait 0)"
        );
    }
}
