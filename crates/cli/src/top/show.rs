//! Formats a view as lines of text.

use super::view::{GuaranteeRow, ProcessRow, SessionRow, View};
use crate::table;

/// Returns the lines of a screen, at most `rows`. Processes and guarantees precede sessions, which are many.
pub fn screen(view: &View, rows: usize) -> Vec<String> {
    let mut lines = vec![summary(view)];
    lines.push(String::new());
    lines.extend(table::lines(
        &PROCESS_HEAD,
        &rows_of(&view.processes, process),
    ));
    if !view.guarantees.is_empty() {
        lines.push(String::new());
        lines.extend(table::lines(
            &GUARANTEE_HEAD,
            &rows_of(&view.guarantees, guarantee),
        ));
    }
    lines.push(String::new());
    lines.extend(table::lines(
        &SESSION_HEAD,
        &rows_of(&view.sessions, session),
    ));
    lines.truncate(rows);
    lines
}

fn summary(view: &View) -> String {
    format!(
        "portolan: {} sessions, {} processes, in {}bit/s, out {}bit/s, {} drops/s, server {} CPU",
        view.sessions.len(),
        view.processes.len(),
        scaled(view.in_bits),
        scaled(view.out_bits),
        scaled(view.drops).trim_end(),
        percent(view.server_cpu),
    )
}

const PROCESS_HEAD: [&str; 7] = [
    "PID",
    "Program",
    "Sessions",
    "In bit/s",
    "Out bit/s",
    "Drops/s",
    "CPU",
];

fn process(row: &ProcessRow) -> Vec<String> {
    vec![
        row.pid.to_string(),
        row.program.clone(),
        row.sessions.to_string(),
        scaled(row.in_bits),
        scaled(row.out_bits),
        scaled(row.drops),
        percent(row.cpu),
    ]
}

const GUARANTEE_HEAD: [&str; 6] = ["Guarantee", "Of", "Granted", "Used", "Unit", "Drops/s"];

fn guarantee(row: &GuaranteeRow) -> Vec<String> {
    let amount = |value: f64| match row.unit {
        "CPU" => percent(value),
        _ if value.is_infinite() => "-".to_owned(),
        _ => scaled(value),
    };
    vec![
        row.kind.to_owned(),
        row.scope.clone(),
        amount(row.granted),
        amount(row.used),
        row.unit.to_owned(),
        scaled(row.drops),
    ]
}

const SESSION_HEAD: [&str; 10] = [
    "Netid",
    "Local",
    "Peer",
    "Holder",
    "In bit/s",
    "Out bit/s",
    "Recv-Q",
    "Send-Q",
    "Retrans/s",
    "CPU",
];

fn session(row: &SessionRow) -> Vec<String> {
    vec![
        row.protocol.to_owned(),
        row.local.to_string(),
        row.remote
            .map_or_else(|| "*".to_owned(), |remote| remote.to_string()),
        row.holder.to_string(),
        scaled(row.in_bits),
        scaled(row.out_bits),
        row.receive_queue.to_string(),
        row.send_queue.to_string(),
        scaled(row.retransmits),
        percent(row.cpu),
    ]
}

fn rows_of<T>(entries: &[T], row: fn(&T) -> Vec<String>) -> Vec<Vec<String>> {
    entries.iter().map(row).collect()
}

/// Formats a value with three digits and a prefix.
fn scaled(value: f64) -> String {
    const PREFIXES: [&str; 5] = ["", "k", "M", "G", "T"];
    // The sum of an empty list is -0.
    let mut value = value + 0.0;
    let mut prefix = 0;
    while value >= 999.5 && prefix + 1 < PREFIXES.len() {
        value /= 1000.0;
        prefix += 1;
    }
    let digits = match value {
        _ if value == value.trunc() => 0,
        _ if value < 9.995 => 2,
        _ if value < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {}", PREFIXES[prefix])
}

fn percent(share: f64) -> String {
    format!("{:.1}%", share * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits_and_a_prefix() {
        for (value, text) in [
            (0.0, "0"),
            (-0.0, "0"),
            (0.5, "0.50"),
            (12.34, "12.3"),
            (999.4, "999"),
            (999.6, "1.00 k"),
            (40e6, "40 M"),
            (1.234e9, "1.23 G"),
            (5e15, "5000 T"),
        ] {
            assert_eq!(scaled(value).trim_end(), text);
        }
    }

    #[test]
    fn a_screen_is_cut_to_its_rows() {
        let view = View {
            seconds: 1.0,
            in_bits: 40e6,
            out_bits: 0.0,
            drops: 2.0,
            server_cpu: 0.015,
            sessions: Vec::new(),
            processes: Vec::new(),
            guarantees: Vec::new(),
        };
        let whole = screen(&view, usize::MAX);
        assert_eq!(
            whole[0],
            "portolan: 0 sessions, 0 processes, in 40 Mbit/s, out 0 bit/s, 2 drops/s, server 1.5% CPU"
        );
        assert_eq!(screen(&view, 3), whole[..3]);
    }
}
