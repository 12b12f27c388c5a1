//! The command lines of `portolan bench` and `portolan report`. `portolan` declares them, and executes a program of its own
//! that measures, so that it links no test bed. Both end with the exit codes that are here.
#![forbid(unsafe_code)]

pub mod exit;

use std::path::PathBuf;

use clap::ValueEnum;

/// The program that measures, in the directory of `portolan` or in `../lib/portolan`.
pub const PROGRAM: &str = "portolan-bench";

#[derive(clap::Args)]
pub struct Bench {
    /// The suites to measure [default: all].
    #[arg(value_enum)]
    pub suites: Vec<Suite>,
    /// Measure only figures whose names contain TEXT.
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub only: String,
    /// Also write the figures to a file; with `-`, write them to standard output, and the table to standard error.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Number of runs of each figure on each stack.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    pub runs: u16,
    /// Measure fewer and shorter cases.
    #[arg(long)]
    pub quick: bool,
}

#[derive(clap::Args)]
pub struct Report {
    /// Measure only these papers, or tables and figures, such as `MB,ms-fig20`.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub only: Vec<String>,
    /// The directory of the page and its figures. Figures that it has already are not measured again.
    #[arg(long, value_name = "DIRECTORY", default_value = "portolan-report")]
    pub output: PathBuf,
    /// Measure again what the directory has already.
    #[arg(long)]
    pub again: bool,
    /// Measure fewer points, with fewer and shorter runs: ten minutes at most.
    #[arg(long)]
    pub quick: bool,
    /// List the tables and figures with the time that each takes.
    #[arg(long)]
    pub list: bool,
    /// Write the page from the figures in the directory, without measuring.
    #[arg(long, conflicts_with_all = ["again", "quick", "list"])]
    pub render: bool,
}

/// A group of cases, selected by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Suite {
    /// Round trips of one message, TCP and UDP, spinning and sleeping.
    Rtt,
    /// One-way transfers.
    Bulk,
    /// Shared buffers beside the socket interface.
    Buffers,
    /// redis-benchmark against redis-server.
    Redis,
    /// wrk against nginx.
    Http,
    /// Short connections, one after the other.
    Conns,
    /// Throughput over impaired paths, and fairness.
    Paths,
    /// Round trips and transfers between two programs of one host.
    Local,
    /// Guarantees: whether they are kept, and what they cost other programs.
    Qos,
    /// The cost of finding a packet's receiver.
    Demux,
    /// Protocol extensions in the packet filter.
    Ext,
    /// Instructions of the protocol engine per segment.
    Engine,
    /// Databases, proxies, web and mail servers, as packaged, where they are installed.
    Apps,
}

impl Suite {
    pub const ALL: [Suite; 13] = [
        Suite::Rtt,
        Suite::Bulk,
        Suite::Buffers,
        Suite::Redis,
        Suite::Http,
        Suite::Conns,
        Suite::Paths,
        Suite::Local,
        Suite::Qos,
        Suite::Demux,
        Suite::Ext,
        Suite::Engine,
        Suite::Apps,
    ];
}
