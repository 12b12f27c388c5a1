//! `portolan capture` (ADR 36): what programs of one host send each other in shared memory, and the packets of programs, as
//! a file of packets. The programs record it in rings, one for each process, of which the server hands the other end to
//! this command.

mod pcapng;
mod segments;
mod view;

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow};
use portolan_proto::capture::{
    CaptureNews, CaptureRequest, PIECE_MAX, RING_MAX, RING_MIN, Subject,
};
use portolan_proto::control::{ReplyBody, RequestBody};
use rustix::io::Errno;
use signal_hook::consts::{SIGINT, SIGTERM};

use self::pcapng::PcapNg;
use self::view::View;
use crate::ServerAddress;
use crate::exit::Failure;
use crate::server::{Subscription, unexpected};

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    server: ServerAddress,
    /// The file to write; `-` for standard output [default: `-`, unless that is a terminal].
    #[arg(short, long, value_name = "FILE")]
    write: Option<PathBuf>,
    /// Capture the sessions of one process.
    #[arg(short, long, value_name = "PID")]
    pid: Option<u32>,
    /// Capture only what programs of this host send each other in shared memory, or only packets.
    #[arg(long, value_name = "WHAT", value_enum)]
    only: Option<Only>,
    /// End after N packets.
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Capture at most BYTES of the data of each packet.
    #[arg(short, long, value_name = "BYTES", default_value_t = PIECE_MAX)]
    snapshot_length: u32,
    /// Buffer for each process in KiB, of 256 to 65536. More loses less of what is sent fast.
    #[arg(short = 'B', long, value_name = "KIB", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(RING_MIN as i64 >> 10..=RING_MAX as i64 >> 10))]
    buffer_size: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Only {
    Local,
    Packets,
}

/// How long to wait for the server's news before the rings are read again.
const BUSY: Duration = Duration::from_millis(1);
const IDLE: Duration = Duration::from_millis(10);

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let out = arguments.output()?;
    let is_ended = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&is_ended))?;
    }
    let request = CaptureRequest {
        pid: arguments.pid,
        ring_size: arguments.buffer_size << 10,
        snap: arguments.snapshot_length,
        subject: match arguments.only {
            Some(Only::Local) => Subject::Local,
            Some(Only::Packets) => Subject::Packets,
            None => Subject::All,
        },
    };
    let mut news = arguments.server.subscribe(RequestBody::Capture(request))?;
    let application = format!("portolan {}", crate::version());
    let mut file = PcapNg::begin(out, &application).map_err(unread)?;
    // libpcap reads no file without an interface.
    file.interface("local").map_err(unread)?;
    let mut view = View::new(file, arguments.count.unwrap_or(u64::MAX));
    let ended = follow(&mut news, &mut view, &is_ended);
    let is_unread = matches!(&ended, Err(Failure::Unread));
    if !is_unread {
        view.finish().map_err(unread)?;
    }
    // tcpdump's words.
    eprintln!("{} packets captured", view.packets());
    eprintln!("{} records dropped by full buffers", view.dropped());
    ended
}

/// Writes packets until a signal, the limit, or the end of the server.
fn follow(
    news: &mut Subscription,
    view: &mut View<Box<dyn Write>>,
    is_ended: &AtomicBool,
) -> Result<(), Failure> {
    loop {
        let is_last = is_ended.load(Ordering::Relaxed);
        // In this order: the news of an end precedes its first record.
        view.collect();
        let has_server = hear(news, view)?;
        let written = view.write().map_err(unread)?;
        if is_last || view.is_full() {
            return Ok(());
        }
        if !has_server {
            return Err(Failure::NoServer(anyhow!(
                "the server has ended the capture"
            )));
        }
        news.wait(if written > 0 { BUSY } else { IDLE })?;
    }
}

/// Handles the server's news. Returns false if the connection has ended.
fn hear(news: &mut Subscription, view: &mut View<Box<dyn Write>>) -> Result<bool, Failure> {
    loop {
        match news.receive() {
            Ok(None) => return Ok(true),
            Ok(Some((ReplyBody::Capture(CaptureNews::Ready), _))) => {
                eprintln!("capturing, with {} processes now", view.processes());
            }
            Ok(Some((ReplyBody::Capture(news), fds))) => {
                view.hear(news, fds).map_err(unread)?;
            }
            Ok(Some((ReplyBody::Error { errno }, _))) => return Err(refusal(errno)),
            Ok(Some(_)) => return Err(unexpected()),
            Err(_) => return Ok(false),
        }
    }
}

fn refusal(errno: i32) -> Failure {
    let errno = Errno::from_raw_os_error(errno);
    match errno {
        Errno::BUSY => Failure::Refused("your user captures twice already".to_owned()),
        errno => Failure::Refused(errno.to_string()),
    }
}

fn unread(error: io::Error) -> Failure {
    match error.kind() {
        io::ErrorKind::BrokenPipe => Failure::Unread,
        _ => error.into(),
    }
}

impl Arguments {
    fn output(&self) -> Result<Box<dyn Write>, Failure> {
        match &self.write {
            Some(path) if path != Path::new("-") => {
                let file = File::create(path).with_context(|| path.display().to_string())?;
                Ok(Box::new(BufWriter::new(file)))
            }
            None if io::stdout().is_terminal() => Err(Failure::Usage(anyhow!(
                "standard output is a terminal: name a file with --write, or a reader: portolan capture | tcpdump -r -"
            ))),
            _ => Ok(Box::new(BufWriter::new(io::stdout()))),
        }
    }
}
