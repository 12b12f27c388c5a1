//! A web service: axum on the sockets of `portolan::net::tokio`, which need no preloaded library.
//!
//! usage: axum-server ADDRESS:PORT
#![forbid(unsafe_code)]

use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::Path;
use axum::routing::{get, post};
use axum::serve::Listener;
use portolan::net::tokio::{TcpListener, TcpStream, drive};
use tokio::runtime::Builder;

/// Pause after an `accept` that has failed, because the process has no free descriptor for instance.
const PAUSE: Duration = Duration::from_millis(100);

/// Gives axum the connections of a listener of Portolan.
struct Connections(TcpListener);

impl Listener for Connections {
    type Io = TcpStream;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (TcpStream, SocketAddr) {
        loop {
            match self.0.accept().await {
                Ok(accepted) => return accepted,
                Err(error) => eprintln!("accept: {error}"),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

async fn greet(Path(name): Path<String>) -> String {
    format!("Hello, {name}.\n")
}

/// Answers with what was sent.
async fn echo(body: String) -> String {
    body
}

async fn serve(endpoint: &str) -> Result<(), Box<dyn Error>> {
    // The runtime waits for packets itself; without this a thread of the library does.
    tokio::spawn(drive());
    let listener = Connections(TcpListener::bind(endpoint).await?);
    let pages = Router::new()
        .route("/hello/{name}", get(greet))
        .route("/echo", post(echo));
    axum::serve(listener, pages).await?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let endpoint = std::env::args().nth(1);
    let endpoint = endpoint.ok_or("usage: axum-server ADDRESS:PORT")?;
    let runtime = Builder::new_multi_thread()
        .enable_io()
        .enable_time()
        .build()?;
    runtime.block_on(serve(&endpoint))
}
