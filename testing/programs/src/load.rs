//! Clients of the kernel's stack that use a connection for as long as a test wants, and check every byte.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use portolan_bench::bed::{Bed, Side, Stack};
use portolan_bench::process::Background;
use rustix::process::{Pid, Signal, kill_process};

use crate::serve;

const IPERF_PORT: u16 = 5201;

/// A client on a thread that checks every byte until it is told to stop, and then the rest.
pub struct Load<T = u64> {
    is_over: Arc<AtomicBool>,
    client: JoinHandle<std::io::Result<T>>,
}

impl<T: Send + 'static> Load<T> {
    fn start(client: impl FnOnce(&AtomicBool) -> std::io::Result<T> + Send + 'static) -> Load<T> {
        let is_over = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&is_over);
        let client = std::thread::spawn(move || {
            client(&theirs).inspect_err(|error| eprintln!("a client has ended: {error}"))
        });
        Load { is_over, client }
    }

    /// Returns what it has done.
    ///
    /// # Panics
    /// If the client has failed.
    pub fn finish(self) -> T {
        self.is_over.store(true, Ordering::Release);
        let done = self.client.join().expect("it does not panic");
        done.unwrap_or_else(|error| panic!("{error}"))
    }
}

/// Sends requests in batches, and awaits the answers to each.
pub fn pipelining(mut stream: TcpStream) -> Load {
    const BATCH: usize = 64;
    Load::start(move |is_over| {
        let mut rounds = 0;
        let mut answers = [0; BATCH * 7];
        while !is_over.load(Ordering::Acquire) {
            stream.write_all(&b"PING\r\n".repeat(BATCH))?;
            stream.read_exact(&mut answers)?;
            assert_eq!(answers[..], b"+PONG\r\n".repeat(BATCH)[..]);
            rounds += 1;
        }
        Ok(rounds)
    })
}

/// Requests one page after the other over HTTP, and checks the answers, which end with `end`.
pub fn browsing(mut stream: TcpStream, end: &'static [u8]) -> Load {
    Load::start(move |is_over| {
        let mut pages = 0;
        let mut answer = Vec::new();
        let mut buffer = [0; 4096];
        while !is_over.load(Ordering::Acquire) {
            stream.write_all(b"GET / HTTP/1.1\r\nHost: server\r\n\r\n")?;
            answer.clear();
            while !answer.ends_with(end) {
                match stream.read(&mut buffer)? {
                    0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                    length => answer.extend_from_slice(&buffer[..length]),
                }
            }
            assert!(answer.starts_with(b"HTTP/1.1 200 "));
            pages += 1;
        }
        Ok(pages)
    })
}

/// Sends one request a millisecond after the answer to the last. Returns how long the answers took, the fastest first.
pub fn pinging(mut stream: TcpStream) -> Load<Vec<Duration>> {
    const PAUSE: Duration = Duration::from_millis(1);
    Load::start(move |is_over| {
        let mut times = Vec::new();
        while !is_over.load(Ordering::Acquire) {
            let asked = Instant::now();
            stream.write_all(b"PING\r\n")?;
            let mut answer = [0; 7];
            stream.read_exact(&mut answer)?;
            assert_eq!(&answer, b"+PONG\r\n");
            times.push(asked.elapsed());
            std::thread::sleep(PAUSE);
        }
        times.sort_unstable();
        Ok(times)
    })
}

/// Sends without pause, and checks what comes back.
pub fn bulk(stream: TcpStream) -> Load {
    let block: Vec<u8> = (0..=250).collect();
    Load::start(move |is_over| {
        let mut outgoing = stream.try_clone()?;
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                while !is_over.load(Ordering::Acquire) {
                    outgoing.write_all(&block)?;
                }
                outgoing.shutdown(std::net::Shutdown::Write)
            });
            let mut incoming = stream;
            let mut buffer = vec![0; 1 << 16];
            let mut count = 0;
            loop {
                let length = incoming.read(&mut buffer)?;
                if length == 0 {
                    sender.join().expect("it does not panic")?;
                    return Ok(count);
                }
                for byte in &buffer[..length] {
                    assert_eq!(u64::from(*byte), count % block.len() as u64);
                    count += 1;
                }
            }
        })
    })
}

/// iperf3 between the hosts, in both directions, until it is interrupted.
pub struct Iperf {
    server: Background,
    client: Child,
}

impl Iperf {
    /// Its control connection, and one for each direction.
    pub const CONNECTIONS: usize = 3;

    /// # Panics
    /// If iperf3 does not start.
    pub fn start(bed: &Bed) -> Iperf {
        let port = IPERF_PORT.to_string();
        let arguments = ["--server", "--port", &port];
        let server = serve(bed, Stack::Portolan, IPERF_PORT, "iperf3", &arguments);
        let mut client = bed.command(Side::Client, Stack::Kernel, "iperf3");
        client.args(["--client", &bed.server.address.to_string(), "--port", &port]);
        client.args(["--bidir", "--bitrate", "100M", "--time", "86400", "--json"]);
        let client = client.stdout(Stdio::piped()).spawn();
        Iperf {
            server,
            client: client.expect("it starts"),
        }
    }

    /// The server's process.
    pub fn server(&self) -> u32 {
        self.server.pid()
    }

    /// Ends the client. Returns the least that either direction has transferred in a second, in bytes, but for the first
    /// second and the last two.
    ///
    /// # Panics
    /// If it has failed.
    pub fn finish(&mut self) -> f64 {
        let client = Pid::from_child(&self.client);
        kill_process(client, Signal::INT).expect("it runs");
        let mut report = String::new();
        let output = self.client.stdout.as_mut().expect("a pipe");
        output.read_to_string(&mut report).expect("it is text");
        self.client.wait().expect("it ends");
        let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
        assert_eq!(
            report["error"], "interrupt - the client has terminated",
            "{report}"
        );
        let seconds = report["intervals"].as_array().expect("one for each second");
        let bytes = |second: &serde_json::Value| {
            ["sum", "sum_bidir_reverse"].map(|sum| second[sum]["bytes"].as_f64().expect("a number"))
        };
        let whole = &seconds[1..seconds.len() - 2];
        whole.iter().flat_map(bytes).fold(f64::MAX, f64::min)
    }
}
