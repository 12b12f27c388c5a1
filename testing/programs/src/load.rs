//! Clients of the kernel's stack that use a connection for as long as a test wants, and check every byte.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// A client on a thread that checks every byte until it is told to stop, and then the rest.
pub struct Load {
    is_over: Arc<AtomicBool>,
    client: JoinHandle<std::io::Result<u64>>,
}

impl Load {
    fn start(client: impl FnOnce(&AtomicBool) -> std::io::Result<u64> + Send + 'static) -> Load {
        let is_over = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&is_over);
        let client = std::thread::spawn(move || {
            client(&theirs).inspect_err(|error| eprintln!("a client has ended: {error}"))
        });
        Load { is_over, client }
    }

    /// Returns how much it has done.
    ///
    /// # Panics
    /// If the client has failed.
    pub fn finish(self) -> u64 {
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
