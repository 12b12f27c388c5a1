//! Programs that own protocol extensions and share maps with them, for benchmarks and tests.
#![forbid(unsafe_code)]

mod keys;
mod messages;
mod turnover;

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand, ValueEnum};
use portolan::extension::thread::{Chain, Datagram, Verdict};
use portolan::extension::{Extension, Map, Object, Port};
use portolan_bench::film::Film;

/// Why a command failed.
type Failure = Box<dyn std::error::Error>;

/// Attempts to reach the other side while it may not run yet.
const TRIES: u32 = 100;

#[derive(Parser)]
#[command(
    name = "portolan-owner",
    version,
    about = "Owners of protocol extensions, for benchmarks and tests"
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Has `rally.c` play with a host that sends everything back, and prints the median round-trip time.
    Rally {
        local: SocketAddr,
        remote: SocketAddr,
        object: PathBuf,
        #[arg(long, default_value_t = 10_000)]
        count: u64,
    },
    /// Serves keys by `values.c` until it is killed: key `kN` has the value `vN`.
    Values {
        local: SocketAddr,
        object: PathBuf,
        #[arg(long, default_value_t = 1000)]
        count: u32,
    },
    /// Has `forward.c` forward all packets to a port to another host, until it is killed.
    Forward {
        protocol: Transport,
        front: SocketAddr,
        to: SocketAddr,
        object: PathBuf,
        /// The first of the ports to which the other host sends its answers.
        #[arg(long, default_value_t = 7100)]
        back: u16,
    },
    /// For each line of input, installs and removes an extension as fast as the server permits.
    TurnOver { local: SocketAddr, object: PathBuf },
    /// Answers by handlers in a thread: datagrams that begin with `+` are left to the owner, which answers `owner`,
    /// those that begin with `-` are consumed, and all others are sent back.
    Threaded { local: SocketAddr },
    /// Plays with a `threaded` by a handler in a thread, and prints the median round-trip time.
    ThreadedRally {
        local: SocketAddr,
        remote: SocketAddr,
        #[arg(long, default_value_t = 10_000)]
        count: u64,
    },
    /// Serves the same keys by a socket.
    ValuesBySocket {
        local: SocketAddr,
        #[arg(long, default_value_t = 1000)]
        count: u32,
    },
    /// Asks for one key after the other, and prints the median time of an answer.
    Ask {
        remote: SocketAddr,
        #[arg(long, default_value_t = 10_000)]
        count: u32,
    },
    /// Answers active messages as `messages.c` does, until it is killed.
    Station,
    /// Sends active messages to the station with this address, and prints the median time of an answer.
    Call {
        address: IpAddr,
        #[arg(long, default_value_t = 10_000)]
        count: u32,
    },
    /// Hands each frame of a film over once, for `video.c` to send to the whole audience.
    Video {
        local: SocketAddr,
        /// The endpoint of the first viewer.
        first: SocketAddr,
        object: PathBuf,
        #[command(flatten)]
        film: Film,
        /// Whether the datagrams have checksums. Without, this program cuts the frames into datagrams.
        #[arg(long, value_enum, default_value_t = Sums::With)]
        checksums: Sums,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum Sums {
    With,
    Without,
}

#[derive(Clone, Copy, ValueEnum)]
enum Transport {
    Tcp,
    Udp,
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Rally {
            local,
            remote,
            object,
            count,
        } => rally(local, remote, &object, count),
        Command::Values {
            local,
            object,
            count,
        } => values(local, &object, count),
        Command::Forward {
            protocol,
            front,
            to,
            object,
            back,
        } => forward(protocol, front, to, &object, back),
        Command::TurnOver { local, object } => turnover::turn_over(local, &object),
        Command::Threaded { local } => threaded(local),
        Command::ThreadedRally {
            local,
            remote,
            count,
        } => threaded_rally(local, remote, count),
        Command::ValuesBySocket { local, count } => keys::serve(local, count),
        Command::Ask { remote, count } => keys::ask(remote, count),
        Command::Station => messages::serve(),
        Command::Call { address, count } => messages::call(address, count),
        Command::Video {
            local,
            first,
            object,
            film,
            checksums,
        } => video(local, first, &object, film, checksums),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("portolan-owner: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn install(port: &Port, name: &str, object: &Path) -> Result<Extension, Failure> {
    let object = Object::parse(&std::fs::read(object)?)?;
    Ok(port.install(name, 128, object)?)
}

fn map<'a>(extension: &'a Extension, name: &str) -> Result<&'a Map, Failure> {
    extension
        .map(name)
        .ok_or_else(|| format!("the extension has no map {name}").into())
}

fn rally(local: SocketAddr, remote: SocketAddr, object: &Path, count: u64) -> Result<(), Failure> {
    let port = Port::open(local)?;
    let extension = install(&port, "rally", object)?;
    let rallies = map(&extension, "rallies")?;
    // One rally more: the first only supplies its time.
    let start = [count + 1, 0].map(u64::to_ne_bytes);
    rallies.set(&[0; 4], start.as_flattened())?;
    port.send(b"8 bytes", remote)?;
    port.receive(&mut [0; 64])?;
    let median = median_length(map(&extension, "lengths")?)?;
    println!(
        "{}",
        serde_json::json!({ "round_trips": count, "p50_us": median })
    );
    Ok(())
}

/// How many lengths `rally.c` distinguishes, and the nanoseconds of each.
const LENGTHS: u32 = 4096;
const LENGTH_NS: f64 = 16.0;

/// Returns the median in microseconds: the middle of its length.
fn median_length(lengths: &Map) -> Result<f64, Failure> {
    let count = |length: u32| -> Result<u64, Failure> {
        let bytes = lengths.get(&length.to_ne_bytes())?;
        Ok(u64::from_ne_bytes(bytes.as_slice().try_into()?))
    };
    let counts: Vec<u64> = (0..LENGTHS).map(count).collect::<Result<_, _>>()?;
    let half = counts.iter().sum::<u64>() / 2;
    let mut below = 0;
    let median = counts.iter().position(|times| {
        below += times;
        below > half
    });
    match median {
        Some(length) if length + 1 < counts.len() => Ok((length as f64 + 0.5) * LENGTH_NS / 1e3),
        _ => Err("half of the round trips took longer than can be told".into()),
    }
}

fn values(local: SocketAddr, object: &Path, count: u32) -> Result<(), Failure> {
    let port = Port::open(local)?;
    let extension = install(&port, "values", object)?;
    let values = map(&extension, "values")?;
    for number in 0..count {
        values.set(
            &padded::<16>(&format!("k{number}")),
            &padded::<32>(&format!("v{number}")),
        )?;
    }
    // Datagrams that are not questions for the handler arrive here.
    loop {
        port.receive(&mut [0; 2048])?;
    }
}

/// Ports towards the other host, as many as `forward.c` has.
const BACK_PORTS: u16 = 32;

fn forward(
    protocol: Transport,
    front: SocketAddr,
    to: SocketAddr,
    object: &Path,
    back: u16,
) -> Result<(), Failure> {
    let backs = back..back + BACK_PORTS;
    let locals = backs.clone().map(|port| SocketAddr::new(front.ip(), port));
    let ports = std::iter::once(front)
        .chain(locals)
        .map(|local| match protocol {
            Transport::Tcp => Port::listen(local),
            Transport::Udp => Port::open(local),
        });
    let ports = ports.collect::<Result<Vec<Port>, _>>()?;
    let object = Object::parse(&std::fs::read(object)?)?;
    let extension = Port::install_on(&ports, "forward", 128, object)?;
    let places = map(&extension, "places")?;
    let place_of_port = map(&extension, "place_of_port")?;
    for (number, port) in (0_u32..).zip(backs) {
        let (number, port) = (number.to_ne_bytes(), u32::from(port).to_ne_bytes());
        // The place of a port that is not in use yet.
        let place: Vec<u8> = [[0; 4]; 6]
            .into_iter()
            .chain([port, [0; 4]])
            .flatten()
            .collect();
        places.set(&number, &place)?;
        place_of_port.set(&port, &number)?;
    }
    let ports = [to.port(), front.port()].map(|port| u32::from(port).to_ne_bytes());
    let settings = [&mapped(to.ip())[..], ports.as_flattened()].concat();
    map(&extension, "settings")?.set(&[0; 4], &settings)?;
    loop {
        std::thread::park();
    }
}

fn threaded(local: SocketAddr) -> Result<(), Failure> {
    let begins = |datagram: &Datagram, with: u8| datagram.payload.first() == Some(&with);
    let chain = Chain::default()
        .with_named("echo", 2, |_| Verdict::Reply)
        .with(1, move |datagram| {
            if begins(datagram, b'+') {
                Verdict::Deliver
            } else {
                Verdict::Pass
            }
        })
        .with(0, move |datagram| {
            if begins(datagram, b'-') {
                Verdict::Consume
            } else {
                Verdict::Pass
            }
        });
    let threaded = Port::open(local)?.handle_in_thread(chain)?;
    // Sent from another endpoint, because the port belongs to the handlers.
    let own = Port::open(SocketAddr::new(local.ip(), 0))?;
    while let Some(Datagram { from: Some(to), .. }) = threaded.receive() {
        own.send(b"owner", to)?;
    }
    Err("the server has gone".into())
}

fn threaded_rally(local: SocketAddr, remote: SocketAddr, count: u64) -> Result<(), Failure> {
    let port = Port::open(local)?;
    port.send(b"8 bytes", remote)?;
    let mut last = Instant::now();
    let mut times = Vec::new();
    let volley = move |datagram: &mut Datagram| {
        times.push(last.elapsed());
        last = Instant::now();
        if times.len() as u64 <= count {
            return Verdict::Reply;
        }
        times.sort_unstable();
        let median = times[times.len() / 2].as_secs_f64() * 1e6;
        datagram.payload = median.to_ne_bytes().to_vec();
        Verdict::Deliver
    };
    let threaded = port.handle_in_thread(Chain::default().with(0, volley))?;
    let end = threaded.receive().ok_or("the server has gone")?;
    let median = f64::from_ne_bytes(end.payload.as_slice().try_into()?);
    println!(
        "{}",
        serde_json::json!({ "round_trips": count, "p50_us": median })
    );
    Ok(())
}

fn video(
    local: SocketAddr,
    first: SocketAddr,
    object: &Path,
    film: Film,
    checksums: Sums,
) -> Result<(), Failure> {
    let port = Port::open(local)?;
    let extension = install(&port, "video", object)?;
    let audience: Vec<SocketAddr> = film.audience(first).collect();
    map(&extension, "audiences")?.set(&[0; 4], &destinations(&audience))?;
    let shown = match checksums {
        Sums::With => {
            port.cut(film.segment)?;
            film.show(|frame| Ok(port.send(frame, first)?))?
        }
        Sums::Without => {
            port.leave_checksums()?;
            film.show(|frame| {
                let pieces = frame.chunks(film.segment.max(1).into());
                Ok(pieces
                    .into_iter()
                    .try_for_each(|piece| port.send(piece, first))?)
            })?
        }
    };
    println!("{}", serde_json::to_string(&shown)?);
    Ok(())
}

/// The capacity of `video.c`.
const DESTINATIONS_MAX: usize = 32;

/// Encodes the audience in the format of `video.c`.
fn destinations(audience: &[SocketAddr]) -> Vec<u8> {
    let mut bytes = (audience.len() as u64).to_ne_bytes().to_vec();
    for to in audience {
        bytes.extend(mapped(to.ip()));
        bytes.extend(to.port().to_ne_bytes());
        bytes.extend([0; 6]);
    }
    bytes.resize(8 + DESTINATIONS_MAX * 24, 0);
    bytes
}

/// Encodes an address as in a view.
fn mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Prints the median of the times as JSON.
fn print_median(mut times: Vec<Duration>) {
    times.sort_unstable();
    let median = times
        .get(times.len() / 2)
        .map_or(0.0, Duration::as_secs_f64)
        * 1e6;
    println!(
        "{}",
        serde_json::json!({ "round_trips": times.len(), "p50_us": median })
    );
}

fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut bytes = [0; N];
    for (place, byte) in bytes.iter_mut().zip(text.bytes()) {
        *place = byte;
    }
    bytes
}
