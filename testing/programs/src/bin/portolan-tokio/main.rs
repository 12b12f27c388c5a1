//! Servers and clients as typical programs in Rust, and checks of how sockets behave: tokio with several threads, on its
//! own sockets (`kernel`), or on those of `portolan::net::tokio`, for which the runtime waits (`native`) or a thread of the
//! library (`threaded`).
//!
//! usage: portolan-tokio STACK serve ADDRESS:PORT
//!        portolan-tokio STACK web ADDRESS:PORT
//!        portolan-tokio STACK talk ADDRESS:PORT CONNECTIONS EXCHANGES
//!        portolan-tokio STACK idle ADDRESS:PORT CONNECTIONS
//!        portolan-tokio STACK cases ADDRESS
#![forbid(unsafe_code)]

use std::error::Error;

use tokio::runtime::{Builder, Runtime};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const THREADS: usize = 4;
const USAGE: &str = "usage: portolan-tokio kernel|native|threaded serve|web|talk|idle|cases ...";

/// The same programs on both kinds of sockets.
#[path = "."]
mod kernel {
    pub(crate) use tokio::net::{TcpListener, TcpSocket, TcpStream, UdpSocket};

    #[path = "cases.rs"]
    pub(crate) mod cases;
    #[path = "programs.rs"]
    pub(crate) mod programs;
}

#[path = "."]
mod native {
    pub(crate) use portolan::net::tokio::{TcpListener, TcpSocket, TcpStream, UdpSocket};

    // The sockets' types differ, and no trait has both.
    #[allow(clippy::duplicate_mod)]
    #[path = "cases.rs"]
    pub(crate) mod cases;
    #[allow(clippy::duplicate_mod)]
    #[path = "programs.rs"]
    pub(crate) mod programs;
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let Some((stack, words)) = arguments.split_first() else {
        return Err(USAGE.into());
    };
    let mut builder = Builder::new_multi_thread();
    // A web server has as many as there are processors; the others are to move tasks between threads.
    if words.first() != Some(&"web") {
        builder.worker_threads(THREADS);
    }
    // Only the sockets' readiness is to wake the tasks of other programs.
    if words.first() == Some(&"cases") {
        builder.enable_time();
    }
    match (*stack, words) {
        ("kernel", words) => {
            let runtime = builder.enable_io().build()?;
            match *words {
                ["cases", address] => runtime.block_on(kernel::cases::run(address.parse()?)),
                _ => runtime.block_on(kernel::programs::run(words)),
            }
        }
        ("native" | "threaded", words) => {
            let runtime = of_native(builder, stack)?;
            match *words {
                ["cases", address] => runtime.block_on(native::cases::run(address.parse()?)),
                _ => runtime.block_on(native::programs::run(words)),
            }
        }
        _ => Err(USAGE.into()),
    }
}

fn of_native(mut builder: Builder, stack: &str) -> std::io::Result<Runtime> {
    if stack == "threaded" {
        return builder.build();
    }
    let runtime = builder.enable_io().build()?;
    runtime.spawn(async {
        // Without a server a thread waits, too.
        let _ = portolan::net::tokio::drive().await;
    });
    Ok(runtime)
}
