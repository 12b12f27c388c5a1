//! The result of a bulk transfer, as confirmed by its receiver.

use std::io::{self, ErrorKind, Read};
use std::time::Instant;

use serde::Serialize;

#[derive(Serialize)]
pub struct Transfer {
    pub bytes: u64,
    pub seconds: f64,
    pub gigabits_per_second: f64,
}

impl Transfer {
    /// Waits until the sink reports how many of the bytes sent since `start` it has read.
    pub fn confirmed(mut sink: impl Read, sent: u64, start: Instant) -> io::Result<Transfer> {
        let mut answer = [0; 8];
        sink.read_exact(&mut answer)?;
        let seconds = start.elapsed().as_secs_f64();
        let bytes = u64::from_be_bytes(answer);
        if bytes != sent {
            let text = format!("sent {sent} bytes, the sink read {bytes}");
            return Err(io::Error::new(ErrorKind::InvalidData, text));
        }
        Ok(Transfer {
            bytes,
            seconds,
            gigabits_per_second: bytes as f64 * 8.0 / seconds / 1e9,
        })
    }
}
