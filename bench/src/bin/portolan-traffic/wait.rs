//! Waits for a server to come up.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

const PAUSE: Duration = Duration::from_millis(10);

pub fn until_accepting(address: SocketAddr, limit: Duration) -> io::Result<()> {
    let start = Instant::now();
    loop {
        match TcpStream::connect_timeout(&address, limit) {
            Ok(_) => return Ok(()),
            Err(error) if start.elapsed() > limit => return Err(error),
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}
