//! The resources that the server has, and what it has made in its namespace.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use libbpf_rs::{MapCore, MapHandle, MapType};
use portolan_netns::{Bed, Daemon};

use crate::budgets::resident_kib;
use crate::common::{Client, control_path, open_files};

use super::KEPT_KIB;

/// Interval between checks of what ends by itself.
const TICK: Duration = Duration::from_millis(250);

const FLOWS: &str = "rows of flows";
const MEMBERS: &str = "rows of members";

/// Values by name. Time and memory need not return to their former values.
pub(crate) struct Holdings {
    counts: Vec<(String, u64)>,
    /// Number of sessions in TIME-WAIT, each of which has a row until it ends.
    time_wait: u64,
    kib: u64,
}

pub(crate) struct Row<'a> {
    name: &'a str,
    before: u64,
    after: u64,
}

impl fmt::Display for Row<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row {
            name,
            before,
            after,
        } = self;
        write!(formatter, "{name:24} {before:10} {after:10}")
    }
}

impl Holdings {
    pub(crate) fn of(bed: &Bed, server: &Daemon) -> Holdings {
        let sessions = Client::connect(&control_path(&bed.a)).sessions();
        let waiting = sessions.iter().filter(|s| s.state == "TIME-WAIT");
        let time_wait = waiting.count() as u64;
        let mut counts = vec![
            ("sessions".to_owned(), sessions.len() as u64 - time_wait),
            ("descriptors".to_owned(), open_files(server) as u64),
            ("threads".to_owned(), threads(server)),
            ("devices".to_owned(), devices(bed)),
            ("kernel sockets".to_owned(), kernel_sockets(server)),
        ];
        counts.extend(map_rows(server));
        Holdings {
            counts,
            time_wait,
            kib: resident_kib(server),
        }
    }

    /// Returns what there is more of than before.
    fn surplus<'a>(&'a self, after: &'a Holdings) -> impl Iterator<Item = Row<'a>> {
        self.counted(after).filter(|row| {
            // Each session in TIME-WAIT has one until it ends.
            let [then, now] = if row.name == FLOWS {
                [self.time_wait, after.time_wait]
            } else {
                [0, 0]
            };
            row.after.saturating_sub(now) > row.before.saturating_sub(then)
        })
    }

    fn counted<'a>(&'a self, after: &'a Holdings) -> impl Iterator<Item = Row<'a>> {
        let names = after.counts.iter();
        names.map(|(name, after)| {
            let before = self.counts.iter().find(|(known, _)| known == name);
            Row {
                name,
                before: before.map_or(0, |(_, count)| *count),
                after: *after,
            }
        })
    }

    pub(crate) fn rows<'a>(&'a self, after: &'a Holdings) -> impl Iterator<Item = Row<'a>> {
        let waiting = Row {
            name: "in TIME-WAIT",
            before: self.time_wait,
            after: after.time_wait,
        };
        let memory = Row {
            name: "KiB of memory",
            before: self.kib,
            after: after.kib,
        };
        self.counted(after).chain([waiting, memory])
    }

    /// Waits until there is nothing more than before, or until the limit.
    pub(crate) fn await_settled(&self, bed: &Bed, server: &Daemon, limit: Duration) -> Holdings {
        let begun = Instant::now();
        loop {
            let after = Holdings::of(bed, server);
            let is_settled = self.surplus(&after).next().is_none();
            if is_settled || begun.elapsed() > limit {
                return after;
            }
            sleep(TICK);
        }
    }

    pub(crate) fn assert_nothing_more(&self, after: &Holdings) {
        let surplus: Vec<String> = self.surplus(after).map(|row| row.to_string()).collect();
        assert!(surplus.is_empty(), "left of the attacks: {surplus:#?}");
        assert!(
            after.kib < self.kib + KEPT_KIB,
            "{} KiB, then {}",
            self.kib,
            after.kib
        );
    }
}

fn threads(server: &Daemon) -> u64 {
    let tasks = format!("/proc/{}/task", server.pid());
    fs::read_dir(tasks).unwrap().count() as u64
}

/// Returns the number of taps, including those of ready channels.
fn devices(bed: &Bed) -> u64 {
    let shown = bed.a.exec("ip").args(["-o", "link"]).output().unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    shown.matches(": ptl").count() as u64
}

/// Returns the number of sockets in the namespace: each port given out has one. Those in TIME-WAIT
/// are the kernel's own.
fn kernel_sockets(server: &Daemon) -> u64 {
    const TIME_WAIT: &str = "06";
    let lines = ["tcp", "tcp6", "udp", "udp6"].map(|table| {
        let path = format!("/proc/{}/net/{table}", server.pid());
        let text = fs::read_to_string(path).unwrap();
        let rows = text.lines().skip(1);
        let state = |row: &&str| row.split_whitespace().nth(3) != Some(TIME_WAIT);
        rows.filter(state).count() as u64
    });
    lines.iter().sum()
}

/// Returns how many rows the flow table has.
pub(crate) fn rows_of_flows(server: &Daemon) -> u64 {
    rows_of(server, FLOWS)
}

pub(crate) fn rows_of_members(server: &Daemon) -> u64 {
    rows_of(server, MEMBERS)
}

fn rows_of(server: &Daemon, table: &str) -> u64 {
    let rows = map_rows(server);
    let wanted = rows.iter().find(|(name, _)| name == table);
    wanted.expect("the filter has it").1
}

/// Returns how many rows the filter's hash tables have.
fn map_rows(server: &Daemon) -> Vec<(String, u64)> {
    let directory = format!("/proc/{}/fdinfo", server.pid());
    let mut rows: Vec<(String, u64)> = Vec::new();
    let mut seen = Vec::new();
    for entry in fs::read_dir(Path::new(&directory)).unwrap().flatten() {
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        let id = text.lines().find_map(|line| line.strip_prefix("map_id:"));
        let Some(id) = id.and_then(|id| id.trim().parse::<u32>().ok()) else {
            continue;
        };
        if seen.contains(&id) {
            continue;
        }
        seen.push(id);
        let Ok(map) = MapHandle::from_map_id(id) else {
            continue;
        };
        if !matches!(map.map_type(), MapType::Hash) {
            continue;
        }
        let name = format!("rows of {}", map.name().to_string_lossy());
        // A row removed during the iteration restarts it.
        let keys: BTreeSet<Vec<u8>> = map.keys().collect();
        let count = keys.len() as u64;
        match rows.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum += count,
            None => rows.push((name, count)),
        }
    }
    rows.sort();
    rows
}
