//! An echo server and its client as typical programs in Rust: tokio with several threads and without timers, so that
//! only the sockets' readiness wakes them.
//!
//! usage: portolan-tokio serve ADDRESS:PORT
//!        portolan-tokio talk ADDRESS:PORT CONNECTIONS EXCHANGES

use std::error::Error;
use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Builder;
use tokio::task::JoinSet;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const THREADS: usize = 4;

async fn serve(endpoint: SocketAddr) -> Outcome<()> {
    let listener = TcpListener::bind(endpoint).await?;
    loop {
        let (mut stream, _) = listener.accept().await?;
        tokio::spawn(async move {
            let (mut from, mut to) = stream.split();
            // Errors are detected by the client.
            let _ = copy(&mut from, &mut to).await;
        });
    }
}

/// One task writes while another one, possibly on another thread, reads the echo.
async fn exchange(endpoint: SocketAddr, number: usize, exchanges: usize) -> Outcome<()> {
    let stream = TcpStream::connect(endpoint).await?;
    let (mut from, mut to) = stream.into_split();
    for turn in 0..exchanges {
        let message = vec![(number + turn) as u8; 1 + (turn * 977) % 30_000];
        let sent = message.clone();
        let writer = tokio::spawn(async move { to.write_all(&sent).await.map(|()| to) });
        let mut back = vec![0; message.len()];
        from.read_exact(&mut back).await?;
        if back != message {
            return Err(format!("connection {number}, exchange {turn}: other bytes").into());
        }
        to = writer.await??;
    }
    Ok(())
}

async fn talk(endpoint: SocketAddr, connections: usize, exchanges: usize) -> Outcome<()> {
    let mut tasks = JoinSet::new();
    for number in 0..connections {
        tasks.spawn(exchange(endpoint, number, exchanges));
    }
    while let Some(outcome) = tasks.join_next().await {
        outcome??;
    }
    println!("exact");
    Ok(())
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let runtime = Builder::new_multi_thread()
        .worker_threads(THREADS)
        .enable_io()
        .build()?;
    match arguments[..] {
        ["serve", endpoint] => runtime.block_on(serve(endpoint.parse()?)),
        ["talk", endpoint, connections, exchanges] => {
            let work = talk(endpoint.parse()?, connections.parse()?, exchanges.parse()?);
            runtime.block_on(work)
        }
        _ => {
            Err("usage: portolan-tokio serve ENDPOINT | talk ENDPOINT CONNECTIONS EXCHANGES".into())
        }
    }
}
