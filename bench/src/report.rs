//! The report: every table and figure of the five papers, measured on this machine beside the kernel's stack, and
//! further measurements. It consists of one JSON file, to which each run adds, and one self-contained page.

mod br;
mod mb;
mod measure;
mod model;
mod ms;
mod ne;
mod page;
mod papers;
mod plot;
mod px;
mod today;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{fs, io};

use measure::Context;
use model::{Content, Exhibit, Machine, Panel, Report};
use papers::{Original, Paper, originals};

use crate::machine::CpuTimes;
use crate::{Effort, MeasureError};

/// A table or figure, and its measurement.
pub struct Entry {
    /// The paper and the number in it, such as `mb-table2`.
    pub id: &'static str,
    paper: Paper,
    number: &'static str,
    title: &'static str,
    /// Duration of the measurement, quick and full.
    seconds: [u32; 2],
    measure: fn(&Context, Option<&Original>) -> Result<Content, MeasureError>,
}

macro_rules! entries {
    ($($id:literal $paper:ident $number:literal $title:literal [$quick:literal, $full:literal] $measure:path;)*) => {
        &[$(Entry {
            id: $id,
            paper: Paper::$paper,
            number: $number,
            title: $title,
            seconds: [$quick, $full],
            measure: $measure,
        },)*]
    };
}

/// All entries, in the order of the page.
pub const ENTRIES: &[Entry] = entries! {
    "mb-table2" Mb "Table 2" "throughput and round trips by delivery form" [70, 230] mb::table2;
    "mb-table3" Mb "Table 3" "the modified interface (NEWAPI)" [25, 240] mb::table3;
    "mb-table4" Mb "Table 4" "where the time goes, layer by layer" [40, 100] mb::table4;
    "ms-table2" Ms "Table II" "locks, signals, switches" [3, 8] ms::table2;
    "ms-table3" Ms "Table III" "the path that sends" [20, 50] ms::table3;
    "ms-table4" Ms "Table IV" "the path that receives" [1, 1] ms::table4;
    "ms-fig11" Ms "Fig. 11" "copying a buffer" [2, 10] ms::fig11;
    "ms-fig12" Ms "Fig. 12" "duplicating a buffer" [1, 1] ms::fig12;
    "ms-fig13" Ms "Fig. 13" "linking buffers" [1, 1] ms::fig13;
    "ms-fig14" Ms "Fig. 14" "inserting and deleting a timer" [2, 8] ms::fig14;
    "ms-fig15" Ms "Fig. 15" "executing a timer" [1, 1] ms::fig15;
    "ms-fig16" Ms "Fig. 16" "checksum" [5, 20] ms::fig16;
    "ms-fig17" Ms "Fig. 17" "checksum and copy, small footprint" [1, 1] ms::fig17;
    "ms-fig18" Ms "Fig. 18" "checksum and copy, large footprint" [1, 1] ms::fig18;
    "ms-fig19" Ms "Fig. 19" "profiles of round trips among other programs" [15, 60] ms::fig19;
    "ms-fig20" Ms "Fig. 20" "demultiplexing against the number of endpoints" [30, 200] ms::fig20;
    "ms-fig21" Ms "Fig. 21" "times between pictures" [20, 35] ms::fig21;
    "px-fig5" Px "Fig. 5" "round trips by placement" [20, 60] px::fig5;
    "px-fig6" Px "Fig. 6" "processor time against streams" [20, 180] px::fig6;
    "px-fig7" Px "Fig. 7" "forwarding" [15, 90] px::fig7;
    "br-table1" Br "Table 1" "latency, TCP" [20, 50] br::table1;
    "br-table2" Br "Table 2" "latency, UDP" [20, 50] br::table2;
    "br-table3" Br "Table 3" "throughput, TCP" [35, 130] br::table3;
    "br-table4" Br "Table 4" "throughput, UDP" [50, 150] br::table4;
    "br-fig5" Br "Fig. 5" "the two paths" [10, 30] br::fig5;
    "br-fig6" Br "Fig. 6" "latency measurement, and counts of both paths" [5, 10] br::fig6;
    "ne-fig5a" Ne "Fig. 5 (a)" "guaranteed shares of a link" [12, 25] ne::fig5a;
    "ne-fig5b" Ne "Fig. 5 (b)" "slack time" [18, 70] ne::fig5b;
    "ne-fig6" Ne "Fig. 6" "best effort" [10, 20] ne::fig6;
    "ne-fig7" Ne "Fig. 7" "receive overload" [14, 25] ne::fig7;
    "today-round-trips" Today "Round trips" "one message at a time" [25, 150] today::round_trips;
    "today-percentiles" Today "Percentiles" "the tail of round trips" [8, 20] today::percentiles;
    "today-transfers" Today "Transfers" "one way, with iperf3 and a program of our own" [15, 120] today::transfers;
    "today-redis" Today "redis" "redis-benchmark against redis-server" [15, 60] today::redis;
    "today-web" Today "nginx" "wrk against one worker" [15, 60] today::web;
    "today-connections" Today "Connections" "opened and closed, and moved" [10, 100] today::connections;
    "today-local" Today "Within a host" "round trips and transfers by 127.0.0.1" [25, 150] today::local;
};

/// What to measure, and where to write it.
pub struct Plan {
    pub directory: PathBuf,
    pub entries: Vec<&'static Entry>,
    pub effort: Effort,
    /// Measures again what the directory has already.
    pub again: bool,
}

/// Why a report could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error("{path}: {source}")]
    File { path: String, source: io::Error },
    #[error("{path} is no report: {source}")]
    Unreadable {
        path: String,
        source: serde_json::Error,
    },
    #[error(
        "{path} has figures of another machine or build; write elsewhere (--output) or measure anew (--again)"
    )]
    OtherMachine { path: String },
    #[error(
        "{0} is no paper (MB, MS, PX, BR, NE, today) and no table or figure (--list shows them)"
    )]
    Unknown(String),
}

/// Events that a run reports to its caller.
pub enum Step<'a> {
    Begins {
        entry: &'a Entry,
        index: usize,
        count: usize,
        left: Duration,
    },
    Failed {
        entry: &'a Entry,
        error: MeasureError,
    },
}

impl Entry {
    /// Returns the paper's short name and the number in it.
    pub fn name(&self) -> String {
        match self.paper {
            Paper::Today => self.number.to_owned(),
            paper => format!("{} {}", paper.short(), self.number),
        }
    }

    pub fn title(&self) -> &'static str {
        self.title
    }

    pub fn seconds(&self, effort: Effort) -> u32 {
        self.seconds[usize::from(!effort.quick)]
    }

    fn is_called(&self, word: &str) -> bool {
        self.paper.short().eq_ignore_ascii_case(word) || self.id.eq_ignore_ascii_case(word)
    }
}

/// Returns the entries of papers, tables or figures by name; without names, all entries.
///
/// # Errors
/// A name is unknown.
pub fn select(words: &[String]) -> Result<Vec<&'static Entry>, ReportError> {
    let unknown = |word: &&String| !ENTRIES.iter().any(|entry| entry.is_called(word));
    if let Some(word) = words.iter().find(unknown) {
        return Err(ReportError::Unknown(word.clone()));
    }
    let is_wanted =
        |entry: &&Entry| words.is_empty() || words.iter().any(|word| entry.is_called(word));
    Ok(ENTRIES.iter().filter(is_wanted).collect())
}

/// Measures what is missing, and writes figures and page after each entry. Returns false if an entry failed.
///
/// # Errors
/// A file cannot be written or read.
pub fn run(plan: &Plan, mut tell: impl FnMut(Step)) -> Result<bool, ReportError> {
    fs::create_dir_all(&plan.directory).map_err(|source| file(&plan.directory, source))?;
    let machine = machine();
    let mut report = match load(&plan.directory)? {
        Some(report) if report.machine == machine => report,
        Some(_) if !plan.again => {
            let path = plan.directory.display().to_string();
            return Err(ReportError::OtherMachine { path });
        }
        _ => Report {
            machine,
            exhibits: BTreeMap::new(),
        },
    };
    let is_done = |entry: &&&Entry| {
        let known = report.exhibits.get(entry.id);
        let is_enough = known.is_some_and(|known| plan.effort.quick || !known.is_quick);
        is_enough && !plan.again
    };
    let left: Vec<_> = plan
        .entries
        .iter()
        .filter(|entry| !is_done(entry))
        .collect();
    let context = Context::new(plan.effort);
    let originals = originals();
    let mut pace = Pace::default();
    let mut complete = true;
    for (index, entry) in left.iter().enumerate() {
        let expected = left[index..].iter().map(|entry| entry.seconds(plan.effort));
        tell(Step::Begins {
            entry,
            index: index + 1,
            count: left.len(),
            left: pace.left(expected.sum()),
        });
        let start = Instant::now();
        match measure_one(&context, entry, originals.get(entry.id)) {
            Ok(exhibit) => {
                report.exhibits.insert(entry.id.to_owned(), exhibit);
                save(&plan.directory, &report)?;
            }
            Err(error) => {
                complete = false;
                tell(Step::Failed { entry, error });
            }
        }
        pace.note(start.elapsed(), entry.seconds(plan.effort));
    }
    save(&plan.directory, &report)?;
    Ok(complete)
}

/// Writes the page from the figures in the directory.
///
/// # Errors
/// There are no figures, or a file cannot be written.
pub fn render(directory: &Path) -> Result<(), ReportError> {
    let missing = || file(&directory.join(JSON), io::ErrorKind::NotFound.into());
    save(directory, &load(directory)?.ok_or_else(missing)?)
}

/// How much slower or faster this machine is than expected.
#[derive(Default)]
struct Pace {
    took: f64,
    expected: f64,
}

impl Pace {
    fn note(&mut self, took: Duration, expected: u32) {
        self.took += took.as_secs_f64();
        self.expected += f64::from(expected);
    }

    fn left(&self, expected: u32) -> Duration {
        // The constants damp the estimate while little has been measured.
        let pace = (self.took + 30.0) / (self.expected + 30.0);
        Duration::from_secs_f64(f64::from(expected) * pace)
    }
}

fn measure_one(
    context: &Context,
    entry: &Entry,
    original: Option<&Original>,
) -> Result<Exhibit, MeasureError> {
    let (before, start) = (CpuTimes::now(), Instant::now());
    let content = (entry.measure)(context, original)?;
    let quick = if context.effort.quick { " --quick" } else { "" };
    Ok(Exhibit {
        paper: entry.paper.short().to_owned(),
        number: entry.number.to_owned(),
        title: entry.title.to_owned(),
        command: format!("portolan report --again --only {}{quick}", entry.id),
        original: original.map(Original::quoted),
        panels: content.panels,
        claims: content.claims,
        notes: content.notes,
        is_quick: context.effort.quick,
        seconds: start.elapsed().as_secs_f64(),
        state: before.state(),
        at: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
    })
}

const JSON: &str = "report.json";
const PAGE: &str = "index.html";
const PLOTS: &str = "plots";

fn load(directory: &Path) -> Result<Option<Report>, ReportError> {
    let path = directory.join(JSON);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(file(&path, source)),
    };
    match serde_json::from_str(&text) {
        Ok(report) => Ok(Some(report)),
        Err(source) => {
            let path = path.display().to_string();
            Err(ReportError::Unreadable { path, source })
        }
    }
}

fn save(directory: &Path, report: &Report) -> Result<(), ReportError> {
    let json = serde_json::to_string(report).map_err(|source| ReportError::Unreadable {
        path: JSON.to_owned(),
        source,
    })?;
    replace(&directory.join(JSON), &json)?;
    replace(&directory.join(PAGE), &page::page(report))?;
    let plots = directory.join(PLOTS);
    fs::create_dir_all(&plots).map_err(|source| file(&plots, source))?;
    for (id, exhibit) in &report.exhibits {
        let drawn = exhibit.panels.iter().filter_map(|panel| match panel {
            Panel::Plot(plot) => Some(plot),
            Panel::Table(_) => None,
        });
        for (number, plot) in drawn.enumerate() {
            let name = format!("{id}-{}.svg", number + 1);
            replace(&plots.join(name), &plot::standalone(plot))?;
        }
    }
    Ok(())
}

/// Replaces a file atomically: an interrupted run leaves either the old or the new contents.
fn replace(path: &Path, text: &str) -> Result<(), ReportError> {
    let new = path.with_extension("new");
    fs::write(&new, text)
        .and_then(|()| fs::rename(&new, path))
        .map_err(|source| file(path, source))
}

fn file(path: &Path, source: io::Error) -> ReportError {
    ReportError::File {
        path: path.display().to_string(),
        source,
    }
}

fn machine() -> Machine {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let (processors, memory) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| Some(line.split_once(':')?.1.trim().to_owned()))
    };
    let memory = field(&memory, "MemTotal").and_then(|text| text.split(' ').next()?.parse().ok());
    Machine {
        processor: field(&processors, "model name").unwrap_or_else(|| "unknown".to_owned()),
        cores: std::thread::available_parallelism().map_or(1, |cores| cores.get()),
        memory_mib: memory.unwrap_or(0_u64) / 1024,
        kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        is_virtual: field(&processors, "flags").is_some_and(|flags| flags.contains("hypervisor")),
        portolan: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All tables and figures that the five papers measure.
    const WANTED: [&str; 30] = [
        "mb-table2",
        "mb-table3",
        "mb-table4",
        "ms-table2",
        "ms-table3",
        "ms-table4",
        "ms-fig11",
        "ms-fig12",
        "ms-fig13",
        "ms-fig14",
        "ms-fig15",
        "ms-fig16",
        "ms-fig17",
        "ms-fig18",
        "ms-fig19",
        "ms-fig20",
        "ms-fig21",
        "px-fig5",
        "px-fig6",
        "px-fig7",
        "br-table1",
        "br-table2",
        "br-table3",
        "br-table4",
        "br-fig5",
        "br-fig6",
        "ne-fig5a",
        "ne-fig5b",
        "ne-fig6",
        "ne-fig7",
    ];

    #[test]
    fn every_table_and_figure_of_the_papers_is_measured_and_quoted() {
        let originals = originals();
        let of_papers = ENTRIES.iter().filter(|entry| entry.paper != Paper::Today);
        let ids: Vec<_> = of_papers.map(|entry| entry.id).collect();
        assert_eq!(ids, WANTED);
        let mut quoted: Vec<_> = originals.keys().map(String::as_str).collect();
        let mut wanted = WANTED.to_vec();
        quoted.sort_unstable();
        wanted.sort_unstable();
        assert_eq!(quoted, wanted);
    }

    #[test]
    fn a_quick_run_is_expected_to_take_ten_minutes_at_most() {
        let quick = Effort { quick: true };
        let seconds: u32 = ENTRIES.iter().map(|entry| entry.seconds(quick)).sum();
        assert!(seconds <= 600, "{seconds} s");
    }

    #[test]
    fn papers_and_figures_are_chosen_by_name() {
        let ids = |words: &[&str]| -> Result<Vec<_>, ReportError> {
            let words: Vec<_> = words.iter().map(|word| (*word).to_owned()).collect();
            Ok(select(&words)?.iter().map(|entry| entry.id).collect())
        };
        assert_eq!(ids(&[]).unwrap().len(), ENTRIES.len());
        assert_eq!(
            ids(&["NE"]).unwrap(),
            ["ne-fig5a", "ne-fig5b", "ne-fig6", "ne-fig7"]
        );
        assert_eq!(
            ids(&["ms-fig20", "mb-table2"]).unwrap(),
            ["mb-table2", "ms-fig20"]
        );
        assert!(
            matches!(ids(&["MB", "fig20"]), Err(ReportError::Unknown(word)) if word == "fig20")
        );
    }
}
