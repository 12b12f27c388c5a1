//! An echo server, a web server, and clients of the former.

use std::convert::Infallible;
use std::net::SocketAddr;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::task::JoinSet;

use super::{TcpListener, TcpStream};
use crate::Outcome;

pub(crate) async fn run(words: &[&str]) -> Outcome<()> {
    match *words {
        ["serve", endpoint] => serve(endpoint.parse()?).await,
        ["web", endpoint] => web(endpoint.parse()?).await,
        ["talk", endpoint, connections, exchanges] => {
            talk(endpoint.parse()?, connections.parse()?, exchanges.parse()?).await
        }
        ["idle", endpoint, connections] => idle(endpoint.parse()?, connections.parse()?).await,
        _ => Err("unknown program".into()),
    }
}

/// Raises the soft limit to the hard one, as servers with many connections do.
fn raise_descriptor_limit() -> Outcome<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let current = maximum;
    Ok(setrlimit(Resource::Nofile, Rlimit { current, maximum })?)
}

async fn serve(endpoint: SocketAddr) -> Outcome<()> {
    raise_descriptor_limit()?;
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

/// Returns as many bytes as the path says.
async fn page(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let length = request.uri().path().trim_start_matches('/').parse();
    let body = vec![b'x'; length.unwrap_or(2)];
    Ok(Response::new(Full::new(Bytes::from(body))))
}

async fn web(endpoint: SocketAddr) -> Outcome<()> {
    let listener = TcpListener::bind(endpoint).await?;
    loop {
        let (stream, _) = listener.accept().await?;
        stream.set_nodelay(true)?;
        tokio::spawn(async move {
            let connection = hyper::server::conn::http1::Builder::new();
            // Errors are detected by the client.
            let _ = connection
                .serve_connection(TokioIo::new(stream), service_fn(page))
                .await;
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

/// Opens connections whose tasks wait, exchanges messages by another one meanwhile, and then by each once.
async fn idle(endpoint: SocketAddr, connections: usize) -> Outcome<()> {
    raise_descriptor_limit()?;
    let mut idle = Vec::new();
    for _ in 0..connections {
        idle.push(TcpStream::connect(endpoint).await?);
    }
    exchange(endpoint, 1, 100).await?;
    let mut tasks = JoinSet::new();
    for mut stream in idle {
        tasks.spawn(async move {
            stream.write_all(b"!").await?;
            stream.read_u8().await
        });
    }
    while let Some(outcome) = tasks.join_next().await {
        outcome??;
    }
    println!("all");
    Ok(())
}
