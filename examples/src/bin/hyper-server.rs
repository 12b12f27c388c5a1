//! A web server: hyper on the sockets of `portolan::net::tokio`, which need no preloaded library.
//!
//! usage: hyper-server ADDRESS:PORT
#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::error::Error;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use portolan::net::tokio::{TcpListener, drive};
use tokio::runtime::Builder;

async fn page(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let text = format!("You asked for {}.\n", request.uri().path());
    Ok(Response::new(Full::new(Bytes::from(text))))
}

async fn serve(endpoint: &str) -> Result<(), Box<dyn Error>> {
    // The runtime waits for packets itself; without this a thread of the library does.
    tokio::spawn(drive());
    let listener = TcpListener::bind(endpoint).await?;
    loop {
        let (stream, peer) = listener.accept().await?;
        tokio::spawn(async move {
            let connection = http1::Builder::new();
            let served = connection.serve_connection(TokioIo::new(stream), service_fn(page));
            if let Err(error) = served.await {
                eprintln!("{peer}: {error}");
            }
        });
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let endpoint = std::env::args().nth(1);
    let endpoint = endpoint.ok_or("usage: hyper-server ADDRESS:PORT")?;
    let runtime = Builder::new_multi_thread().enable_io().build()?;
    runtime.block_on(serve(&endpoint))
}
