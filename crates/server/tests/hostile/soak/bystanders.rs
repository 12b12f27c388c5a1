//! Another user's redis, nginx and iperf3 on Portolan, queried by clients on the other host; and a redis and an nginx
//! on the kernel's stack, to tell effects of the attacks on the machine from effects by way of Portolan.

use std::fmt;
use std::fs;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle, sleep};
use std::time::{Duration, Instant};

use portolan_netns::{Bed, Daemon, Namespace, Ready};
use portolan_sys::namespace;

use crate::TIMEOUT;
use crate::meter::{VICTIM, percentile};

/// Ports of redis and nginx on Portolan and on the kernel's stack, and of iperf3.
const REDIS: [u16; 2] = [6379, 6380];
pub(super) const NGINX: [u16; 2] = [8080, 8081];
const IPERF: u16 = 5201;

/// Bits per second that iperf3 is to carry, which leaves processor time for the others.
const RATE: f64 = 100e6;

/// The part of it that must arrive.
const LEAST: f64 = 0.95;

/// Intervals between questions.
const BETWEEN_GETS: Duration = Duration::from_millis(3);
const BETWEEN_PAGES: Duration = Duration::from_millis(25);

/// Times that are harmless even if more than twice those without an attack, as in [`crate::meter`]: here all attack at
/// once. A page opens a connection: some exchanges with the server, each of which has its turn after one of every other
/// user's.
const GET_FLOOR: Duration = Duration::from_millis(50);
pub(super) const PAGE_FLOOR: Duration = Duration::from_millis(100);

/// Shown length of a wrong answer.
const SHOWN: usize = 400;

const VALUE: &[u8] = &[b'v'; 1000];
const PAGE: &[u8] = &[b'p'; 5000];

/// Returns copies of Portolan's programs where every user may execute them.
pub(super) fn public_programs(host: &Namespace) -> PathBuf {
    let built = Path::new(env!("CARGO_BIN_EXE_portoland")).parent().unwrap();
    let directory = std::env::temp_dir().join(format!("portolan-soak-{}", host.inode()));
    fs::create_dir_all(&directory).unwrap();
    for name in ["portolan", "portolan-traffic", "libportolan_preload.so"] {
        let copied = directory.join(name);
        if !copied.exists() {
            fs::copy(built.join(name), copied).expect("`cargo build` has made it");
        }
    }
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
    directory
}

/// Answer times of one kind of question, without and during the attacks.
struct Asked {
    name: String,
    floor: Duration,
    quiet: Vec<Duration>,
    attacked: Vec<Duration>,
    errors: Vec<String>,
}

impl Asked {
    fn p99(&self) -> [Duration; 2] {
        [&self.quiet, &self.attacked].map(|samples| percentile(samples, 99))
    }

    fn is_within(&self, beside: &Asked) -> bool {
        let [quiet, attacked] = self.p99();
        let machine = beside.p99()[1];
        attacked <= (2 * quiet).max(3 * machine).max(self.floor)
    }
}

impl fmt::Display for Asked {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [quiet, attacked] = self.p99();
        let ratio = attacked.as_secs_f64() / quiet.as_secs_f64();
        let longest = [&self.quiet, &self.attacked].map(|s| percentile(s, 100));
        let median = [&self.quiet, &self.attacked].map(|s| percentile(s, 50));
        write!(
            formatter,
            "{:18} {:>9.1?} {quiet:>9.1?} {:>9.1?} | {:>9.1?} {attacked:>9.1?} {:>9.1?} | {ratio:4.2} x, {} answers, {} errors",
            self.name,
            median[0],
            longest[0],
            median[1],
            longest[1],
            self.attacked.len(),
            self.errors.len(),
        )
    }
}

/// Results of the clients.
pub(super) struct Fared {
    /// Each on Portolan, and beside it on the kernel's stack.
    pairs: Vec<[Asked; 2]>,
    stream: Streamed,
    /// Errors logged by nginx on Portolan.
    nginx_log: String,
}

impl Fared {
    pub(super) fn assert_unharmed(&self) {
        for [ours, kernels] in &self.pairs {
            let log = &self.nginx_log;
            assert!(
                ours.errors.is_empty(),
                "{}: {:?}, nginx: {log}",
                ours.name,
                ours.errors
            );
            assert!(ours.is_within(kernels), "{ours}\n{kernels}");
        }
        assert_eq!(self.stream.error, None);
        let least = LEAST * RATE;
        assert!(self.stream.mean >= least, "{}", self.stream);
        assert!(self.stream.worst_second > 0.0, "{}", self.stream);
    }
}

impl fmt::Display for Fared {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            formatter,
            "{:18} {:>9} {:>9} {:>9} | {:>9} {:>9} {:>9} |",
            "", "quiet p50", "p99", "max", "att. p50", "p99", "max"
        )?;
        for asked in self.pairs.iter().flatten() {
            writeln!(formatter, "{asked}")?;
            for error in asked.errors.iter().take(5) {
                writeln!(formatter, "    {error}")?;
            }
        }
        writeln!(formatter, "{}", self.stream)
    }
}

/// Results of iperf3, in bits per second.
struct Streamed {
    mean: f64,
    worst_second: f64,
    error: Option<String>,
}

impl Streamed {
    /// Parses iperf3's JSON: the receiver's sum, and each second of the sender's.
    fn of(text: &str) -> Streamed {
        let number_after = |text: &str, key: &str| {
            let rest = text.split_once(key)?.1;
            let digits: String = rest
                .trim_start_matches([':', ' ', '\t'])
                .chars()
                .take_while(|c| c.is_ascii_digit() || ".e+-".contains(*c))
                .collect();
            digits.parse::<f64>().ok()
        };
        let rate = "\"bits_per_second\"";
        let received = text.rsplit_once("\"sum_received\"").map(|(_, rest)| rest);
        let seconds = text.split("\"streams\"").skip(1);
        let rates: Vec<f64> = seconds.filter_map(|s| number_after(s, rate)).collect();
        // The last is the summary, the one before it may be a part of a second.
        let whole = &rates[..rates.len().saturating_sub(2)];
        let error = text
            .split_once("\"error\"")
            .map(|(_, rest)| rest.chars().take(100).collect());
        Streamed {
            mean: received.and_then(|r| number_after(r, rate)).unwrap_or(0.0),
            worst_second: whole.iter().copied().fold(f64::INFINITY, f64::min),
            error,
        }
    }
}

impl fmt::Display for Streamed {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "iperf3: {:.1} of {:.0} Mbit/s, {:.1} in the worst second, error: {:?}",
            self.mean / 1e6,
            RATE / 1e6,
            self.worst_second / 1e6,
            self.error
        )
    }
}

/// The user's programs, and their clients.
pub(super) struct Bystanders {
    is_attack: Arc<AtomicBool>,
    is_over: Arc<AtomicBool>,
    clients: Vec<[JoinHandle<Asked>; 2]>,
    stream: Child,
    /// Redis and nginx on Portolan, then those on the kernel's stack, and iperf3.
    services: Vec<Daemon>,
    directory: PathBuf,
}

impl Bystanders {
    /// Starts them; they are queried for at most `duration`.
    pub(super) fn start(bed: &Bed, duration: Duration) -> Bystanders {
        let programs = public_programs(&bed.a);
        let directory = programs.join("served");
        fs::create_dir_all(&directory).unwrap();
        chown(&directory, Some(VICTIM), Some(VICTIM)).unwrap();
        fs::write(directory.join("page"), PAGE).unwrap();
        let services = services(&bed.a, &programs, &directory);
        let is_attack = Arc::new(AtomicBool::new(false));
        let is_over = Arc::new(AtomicBool::new(false));
        let ask = |name: &str, port: u16, what: Question| {
            let address = SocketAddr::new(Bed::A4, port);
            let [is_attack, is_over] = [&is_attack, &is_over].map(Arc::clone);
            let asked = Asked {
                name: name.to_owned(),
                floor: what.floor,
                quiet: Vec::new(),
                attacked: Vec::new(),
                errors: Vec::new(),
            };
            let host = bed.b.as_fd().try_clone_to_owned().unwrap();
            thread::spawn(move || {
                namespace::enter(&host).expect("root may");
                go_on(asked, address, &what, &is_attack, &is_over)
            })
        };
        let clients = vec![
            [
                ask("redis", REDIS[0], GETS),
                ask("  kernel's", REDIS[1], GETS),
            ],
            [
                ask("nginx", NGINX[0], PAGES),
                ask("  kernel's", NGINX[1], PAGES),
            ],
        ];
        let seconds = duration.as_secs().to_string();
        let stream = bed
            .b
            .exec("iperf3")
            .args([
                "-c",
                &Bed::A4.to_string(),
                "-p",
                &IPERF.to_string(),
                "-J",
                "-i",
                "1",
            ])
            .args(["-b", &format!("{RATE}"), "-t", &seconds])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Bystanders {
            is_attack,
            is_over,
            clients,
            stream,
            services,
            directory,
        }
    }

    pub(super) fn attack_begins(&mut self) {
        self.is_attack.store(true, Ordering::Relaxed);
    }

    pub(super) fn finish(self) -> Fared {
        self.is_over.store(true, Ordering::Relaxed);
        // All clients have ended before the page goes.
        let pairs: Vec<[Asked; 2]> = self
            .clients
            .into_iter()
            .map(|pair| pair.map(|client| client.join().unwrap()))
            .collect();
        let streamed = self.stream.wait_with_output().unwrap();
        // Only processes that run the copies have them open.
        let _ = fs::remove_dir_all(self.directory.parent().expect("a parent"));
        Fared {
            pairs,
            nginx_log: problems(&self.services[1].output()),
            stream: Streamed::of(&String::from_utf8_lossy(&streamed.stdout)),
        }
    }
}

/// Returns the last lines of nginx's log, except those about clients that hang up.
fn problems(log: &str) -> String {
    let lines: Vec<&str> = log
        .lines()
        .filter(|line| !line.contains("closed connection"))
        .collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

/// Starts the user's programs: on Portolan, and for comparison on the kernel's stack.
fn services(host: &Namespace, programs: &Path, directory: &Path) -> Vec<Daemon> {
    let as_user = |is_ours: bool, words: &[&str], port: u16| {
        let (user, group) = (format!("--reuid={VICTIM}"), format!("--regid={VICTIM}"));
        let mut command: Command = host.exec("setpriv");
        command.args([&user, &group, "--clear-groups", "--"]);
        if is_ours {
            command
                .arg(programs.join("portolan"))
                .args(["run", "--require", "--"]);
        }
        command.args(words).current_dir(directory);
        Daemon::start(command, Ready::TcpPort(port))
    };
    let address = Bed::A4.to_string();
    let mut services = Vec::new();
    for (is_ours, (redis, nginx)) in [true, false].into_iter().zip(REDIS.into_iter().zip(NGINX)) {
        let port = redis.to_string();
        let words = ["redis-server", "--bind", &address, "--port", &port];
        let more = [
            "--save",
            "",
            "--protected-mode",
            "no",
            "--loglevel",
            "warning",
        ];
        services.push(as_user(is_ours, &[&words[..], &more].concat(), redis));
        let config = directory.join(format!("nginx-{nginx}.conf"));
        fs::write(&config, nginx_config(directory, nginx)).unwrap();
        let words = ["/usr/sbin/nginx", "-c", config.to_str().unwrap()];
        services.push(as_user(is_ours, &words, nginx));
    }
    let words = ["iperf3", "-s", "-B", &address, "-p", &IPERF.to_string()];
    services.push(as_user(true, &words, IPERF));
    services
}

fn nginx_config(directory: &Path, port: u16) -> String {
    let own = |name: &str| {
        directory
            .join(format!("{name}-{port}"))
            .display()
            .to_string()
    };
    let kinds = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"];
    let temporary = kinds
        .map(|kind| format!("{kind}_temp_path {};", own(kind)))
        .join(" ");
    format!(
        "daemon off; master_process off; pid {}; error_log stderr info;\n\
         events {{ worker_connections 256; }}\n\
         http {{ access_log off; {temporary} server {{ listen {}:{port}; root {}; }} }}\n",
        own("pid"),
        Bed::A4,
        directory.display(),
    )
}

/// A question that a client repeats.
#[derive(Clone, Copy)]
struct Question {
    pause: Duration,
    floor: Duration,
    /// Called once; returns the connection for `ask`, if a single one is used.
    prepare: fn(SocketAddr) -> std::io::Result<Option<TcpStream>>,
    ask: fn(SocketAddr, Option<&mut TcpStream>) -> std::io::Result<()>,
}

const GETS: Question = Question {
    pause: BETWEEN_GETS,
    floor: GET_FLOOR,
    prepare: |address| {
        let mut stream = connect(address)?;
        let length = VALUE.len();
        let set = format!("*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n${length}\r\n");
        stream.write_all(&[set.as_bytes(), VALUE, b"\r\n"].concat())?;
        expect(&mut stream, b"+OK\r\n")?;
        Ok(Some(stream))
    },
    ask: |_, stream| {
        let stream = stream.expect("it is prepared");
        stream.write_all(b"*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n")?;
        let head = format!("${}\r\n", VALUE.len());
        expect(stream, &[head.as_bytes(), VALUE, b"\r\n"].concat())
    },
};

const PAGES: Question = Question {
    pause: BETWEEN_PAGES,
    floor: PAGE_FLOOR,
    prepare: |_| Ok(None),
    ask: |address, _| {
        let mut stream = connect(address)?;
        stream.write_all(b"GET /page HTTP/1.0\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        if answer.ends_with(PAGE) {
            Ok(())
        } else {
            Err(std::io::Error::other(format!(
                "{} bytes came: {}",
                answer.len(),
                String::from_utf8_lossy(&answer[..answer.len().min(SHOWN)]).escape_debug(),
            )))
        }
    },
};

fn connect(address: SocketAddr) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, TIMEOUT.expect("there is an end to it"))?;
    stream.set_read_timeout(TIMEOUT)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn expect(stream: &mut TcpStream, text: &[u8]) -> std::io::Result<()> {
    let mut answer = vec![0; text.len()];
    stream.read_exact(&mut answer)?;
    if answer == text {
        Ok(())
    } else {
        Err(std::io::Error::other("another answer came"))
    }
}

fn go_on(
    mut asked: Asked,
    address: SocketAddr,
    what: &Question,
    is_attack: &AtomicBool,
    is_over: &AtomicBool,
) -> Asked {
    let mut stream = match (what.prepare)(address) {
        Ok(stream) => stream,
        Err(error) => {
            asked.errors.push(format!("at first: {error}"));
            return asked;
        }
    };
    while !is_over.load(Ordering::Relaxed) {
        let attacked = is_attack.load(Ordering::Relaxed);
        let start = Instant::now();
        if let Err(error) = (what.ask)(address, stream.as_mut()) {
            asked.errors.push(error.to_string());
        }
        let took = start.elapsed();
        let samples = if attacked {
            &mut asked.attacked
        } else {
            &mut asked.quiet
        };
        // As in the meter, it counts for those that it has delayed.
        let missed = took.as_nanos() / what.pause.as_nanos();
        let each = u32::try_from(missed).unwrap_or(u32::MAX);
        samples.extend((0..=each.min(10_000)).map(|n| took - what.pause * n));
        sleep(what.pause.saturating_sub(took));
    }
    asked
}
