//! The tables of `portolan top`: which there are, and their columns.

use super::sheet::{Arrangement, Column, Sheet, alarm_if_any, count, percent, scaled, warn_if_any};
use super::view::{GuaranteeRow, LinkRow, ProcessRow, SessionRow, UserRow, View};

/// One table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Tab {
    Processes,
    Sessions,
    Users,
    Links,
    Guarantees,
}

impl Tab {
    /// In the order of the keys 1 to 5.
    pub(super) const ALL: [Tab; 5] = [
        Tab::Processes,
        Tab::Sessions,
        Tab::Users,
        Tab::Links,
        Tab::Guarantees,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Tab::Processes => "Processes",
            Tab::Sessions => "Sessions",
            Tab::Users => "Users",
            Tab::Links => "Links",
            Tab::Guarantees => "Guarantees",
        }
    }

    /// Returns the table's contents.
    pub(super) fn sheet(self, view: &View, arrangement: &Arrangement) -> Sheet {
        match self {
            Tab::Processes => Sheet::of(&PROCESSES, &view.processes, arrangement),
            Tab::Sessions => Sheet::of(&SESSIONS, &view.sessions, arrangement),
            Tab::Users => Sheet::of(&USERS, &view.users, arrangement),
            Tab::Links => Sheet::of(&LINKS, &view.links, arrangement),
            Tab::Guarantees => Sheet::of(&GUARANTEES, &view.guarantees, arrangement),
        }
    }

    pub(super) fn heads(self) -> Vec<&'static str> {
        fn heads<T>(columns: &[Column<T>]) -> Vec<&'static str> {
            columns.iter().map(Column::head).collect()
        }
        match self {
            Tab::Processes => heads(&PROCESSES),
            Tab::Sessions => heads(&SESSIONS),
            Tab::Users => heads(&USERS),
            Tab::Links => heads(&LINKS),
            Tab::Guarantees => heads(&GUARANTEES),
        }
    }

    /// Returns the first column whose head begins with `text`, in any case of letters.
    pub(super) fn column(self, text: &str) -> Option<usize> {
        let text = text.to_lowercase();
        let begins = |head: &&str| head.to_lowercase().starts_with(&text);
        self.heads().iter().position(begins)
    }
}

/// Returns the line above all tables, in parts, so that a narrow screen can break it.
pub(super) fn summary(view: &View) -> Vec<String> {
    vec![
        format!("{} sessions", view.sessions.len()),
        format!("{} processes", view.processes.len()),
        format!("in {}bit/s", scaled(view.traffic.in_bits)),
        format!("out {}bit/s", scaled(view.traffic.out_bits)),
        format!("{} drops/s", scaled(view.drops).trim_end()),
        format!("server {} CPU", percent(view.server_cpu)),
    ]
}

static PROCESSES: [Column<ProcessRow>; 7] = [
    Column::number("PID", 3, |row| f64::from(row.pid), count),
    Column::text("Program", 0, |row| row.program.clone()),
    Column::number("Sessions", 4, |row| row.sessions as f64, count),
    Column::number("In bit/s", 0, |row| row.traffic.in_bits, scaled),
    Column::number("Out bit/s", 0, |row| row.traffic.out_bits, scaled),
    Column::number("Drops/s", 2, |row: &ProcessRow| row.drops, scaled).with_tone(alarm_if_any),
    Column::number("CPU", 1, |row| row.cpu, percent),
];

static SESSIONS: [Column<SessionRow>; 10] = [
    Column::text("Netid", 8, |row| row.protocol.to_owned()),
    Column::text("Local", 0, |row| row.local.to_string()),
    Column::text("Peer", 1, |row| {
        row.remote
            .map_or_else(|| "*".to_owned(), |remote| remote.to_string())
    }),
    Column::text("Holder", 2, |row| row.holder.to_string()),
    Column::number("In bit/s", 0, |row| row.traffic.in_bits, scaled),
    Column::number("Out bit/s", 0, |row| row.traffic.out_bits, scaled),
    Column::number("Recv-Q", 6, |row| row.receive_queue.into(), count),
    Column::number("Send-Q", 7, |row| row.send_queue.into(), count),
    Column::number("Retrans/s", 5, |row: &SessionRow| row.retransmits, scaled)
        .with_tone(warn_if_any),
    Column::number("CPU", 4, |row| row.cpu, percent),
];

static USERS: [Column<UserRow>; 7] = [
    Column::text("User", 0, |row| {
        row.user.clone().unwrap_or_else(|| row.uid.to_string())
    }),
    Column::number("Processes", 3, |row| row.processes as f64, count),
    Column::number("Sessions", 4, |row| row.sessions as f64, count),
    Column::number("In bit/s", 0, |row| row.traffic.in_bits, scaled),
    Column::number("Out bit/s", 0, |row| row.traffic.out_bits, scaled),
    Column::number("Drops/s", 2, |row: &UserRow| row.drops, scaled).with_tone(alarm_if_any),
    Column::number("CPU", 1, |row| row.cpu, percent),
];

static LINKS: [Column<LinkRow>; 7] = [
    Column::text("Link", 0, |row| {
        let gone = if row.is_present { "" } else { " (gone)" };
        format!("{}{gone}", row.device)
    }),
    Column::number("In bit/s", 0, |row| row.traffic.in_bits, scaled),
    Column::number("Out bit/s", 0, |row| row.traffic.out_bits, scaled),
    Column::number("Rate", 3, |row| row.rate, scaled),
    Column::number("Reserved", 4, |row| row.reserved, scaled),
    Column::number("Drops/s", 2, |row: &LinkRow| row.drops, scaled).with_tone(alarm_if_any),
    Column::share("Use", 1, |row| share(row.traffic.out_bits, row.rate)),
];

static GUARANTEES: [Column<GuaranteeRow>; 7] = [
    Column::text("Guarantee", 3, |row| row.kind.to_owned()),
    Column::text("Of", 0, |row| row.scope.clone()),
    Column::amount(
        "Granted",
        2,
        |row| row.granted,
        |row| amount(row.unit, row.granted),
    ),
    Column::amount("Used", 1, |row| row.used, |row| amount(row.unit, row.used)),
    Column::text("Unit", 4, |row| row.unit.to_owned()),
    Column::number("Drops/s", 2, |row: &GuaranteeRow| row.drops, scaled).with_tone(alarm_if_any),
    Column::share("Use", 0, |row| share(row.used, row.granted)),
];

/// Returns NaN if the whole is unlimited, unknown or nothing.
fn share(part: f64, whole: f64) -> f64 {
    if whole.is_finite() && whole > 0.0 {
        part / whole
    } else {
        f64::NAN
    }
}

fn amount(unit: &str, value: f64) -> String {
    match unit {
        "CPU" => percent(value),
        _ => scaled(value).trim_end().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_found_by_the_beginning_of_their_heads() {
        assert_eq!(Tab::Processes.column("cpu"), Some(6));
        assert_eq!(Tab::Processes.column("In"), Some(3));
        assert_eq!(Tab::Processes.column("nothing"), None);
        assert_eq!(Tab::Sessions.column("send"), Some(7));
    }
}
