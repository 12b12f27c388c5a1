//! What tokio's own tests of sockets check (`tcp_accept`, `tcp_connect`, `tcp_echo`, `tcp_into_split`, `tcp_peek`,
//! `tcp_shutdown`, `tcp_stream`, `udp`), and what programs rely on besides: cancelled calls lose nothing. Both ends are in
//! this process.

use std::future::Future;
use std::io::{Error, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy};
use tokio::time::{sleep, timeout};

use super::{TcpListener, TcpStream, UdpSocket, bind, connect, listen};
use crate::Outcome;

/// A call that has not returned after this time waits for something.
const A_WHILE: Duration = Duration::from_millis(50);
/// No case takes as long.
const TOO_LONG: Duration = Duration::from_secs(20);

pub(crate) async fn run(address: IpAddr) -> Outcome<()> {
    play("accept", accept(address)).await?;
    play("accept by several", accept_by_several(address)).await?;
    play("accept cancelled", accept_cancelled(address)).await?;
    play("connect", connect_addresses(address)).await?;
    play("connect refused", connect_refused(address)).await?;
    play("echo", echo(address)).await?;
    play("split", split(address)).await?;
    play("into split", into_split(address)).await?;
    play("reunite", reunite(address)).await?;
    play("drop of the writing half", drop_write(address)).await?;
    play("peek", peek(address)).await?;
    play("shutdown", shutdown(address)).await?;
    play("shutdown twice", shutdown_twice(address)).await?;
    play("half-close", half_close(address)).await?;
    play("end while waiting", end_while_waiting(address)).await?;
    play("reset while waiting", reset_while_waiting(address)).await?;
    play("try to read", try_read(address)).await?;
    play("try to write", try_write(address)).await?;
    play("read cancelled", read_cancelled(address)).await?;
    play("write cancelled", write_cancelled(address)).await?;
    play("connect cancelled", connect_cancelled(address)).await?;
    play("other threads", other_threads(address)).await?;
    play("datagrams", datagrams(address)).await?;
    play("datagrams between peers", connected_datagrams(address)).await?;
    play("datagrams to several tasks", datagrams_to_several(address)).await?;
    println!("as expected");
    Ok(())
}

async fn play(name: &str, case: impl Future<Output = Outcome<()>>) -> Outcome<()> {
    match timeout(TOO_LONG, case).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(format!("{name}: {error}").into()),
        Err(_) => Err(format!("{name}: it does not end").into()),
    }
}

fn check(condition: bool, expected: &str) -> Outcome<()> {
    if condition {
        Ok(())
    } else {
        Err(format!("not so: {expected}").into())
    }
}

/// Does the call wait?
async fn waits<T>(call: impl Future<Output = T>) -> bool {
    timeout(A_WHILE, call).await.is_err()
}

fn kind<T>(result: Result<T, Error>) -> Option<ErrorKind> {
    result.err().map(|error| error.kind())
}

async fn listener(address: IpAddr) -> Outcome<(TcpListener, SocketAddr)> {
    let listener = listen(SocketAddr::new(address, 0)).await?;
    let endpoint = listener.local_addr()?;
    Ok((listener, endpoint))
}

/// Returns both ends of a connection: the active one first.
async fn pair(address: IpAddr) -> Outcome<(TcpStream, TcpStream)> {
    let (listener, endpoint) = listener(address).await?;
    let accepted = tokio::spawn(async move { listener.accept().await });
    let active = TcpStream::connect(endpoint).await?;
    let (passive, _) = accepted.await??;
    Ok((active, passive))
}

async fn accept(address: IpAddr) -> Outcome<()> {
    let (listener, endpoint) = listener(address).await?;
    check(waits(listener.accept()).await, "accept waits")?;
    for _ in 0..20 {
        let client = tokio::spawn(TcpStream::connect(endpoint));
        let (stream, peer) = listener.accept().await?;
        let client = client.await??;
        check(peer == client.local_addr()?, "the peer is the client")?;
        check(
            stream.local_addr()? == endpoint,
            "the address is the listener's",
        )?;
    }
    Ok(())
}

async fn accept_by_several(address: IpAddr) -> Outcome<()> {
    let (listener, endpoint) = listener(address).await?;
    let listener = Arc::new(listener);
    let acceptors: Vec<_> = (0..4)
        .map(|_| {
            let listener = Arc::clone(&listener);
            tokio::spawn(async move { listener.accept().await })
        })
        .collect();
    sleep(A_WHILE).await;
    let mut clients = Vec::new();
    for _ in 0..acceptors.len() {
        clients.push(TcpStream::connect(endpoint).await?);
    }
    for acceptor in acceptors {
        acceptor.await??;
    }
    Ok(())
}

async fn accept_cancelled(address: IpAddr) -> Outcome<()> {
    let (listener, endpoint) = listener(address).await?;
    for _ in 0..10 {
        check(waits(listener.accept()).await, "accept waits")?;
        let client = TcpStream::connect(endpoint).await?;
        let (_, peer) = listener.accept().await?;
        check(peer == client.local_addr()?, "the peer is the client")?;
    }
    Ok(())
}

async fn connect_addresses(address: IpAddr) -> Outcome<()> {
    let (active, passive) = pair(address).await?;
    check(active.peer_addr()? == passive.local_addr()?, "one address")?;
    check(active.local_addr()? == passive.peer_addr()?, "one address")
}

async fn connect_refused(address: IpAddr) -> Outcome<()> {
    let (listener, endpoint) = listener(address).await?;
    drop(listener);
    let refused = kind(TcpStream::connect(endpoint).await);
    check(
        refused == Some(ErrorKind::ConnectionRefused),
        "it is refused",
    )
}

async fn echo(address: IpAddr) -> Outcome<()> {
    const MESSAGE: [u8; 1000] = [7; 1000];
    const TIMES: usize = 2000;
    let (active, mut passive) = pair(address).await?;
    tokio::spawn(async move {
        let (mut from, mut to) = passive.split();
        copy(&mut from, &mut to).await
    });
    let (mut from, mut to) = active.into_split();
    let writer = tokio::spawn(async move {
        for _ in 0..TIMES {
            to.write_all(&MESSAGE).await?;
        }
        to.shutdown().await
    });
    let mut back = Vec::new();
    from.read_to_end(&mut back).await?;
    writer.await??;
    check(back == MESSAGE.repeat(TIMES), "all bytes come back")
}

async fn split(address: IpAddr) -> Outcome<()> {
    let (mut active, mut passive) = pair(address).await?;
    let (mut from, mut to) = active.split();
    let mut bytes = [0; 5];
    to.write_all(b"there").await?;
    passive.read_exact(&mut bytes).await?;
    passive.write_all(b"again").await?;
    from.read_exact(&mut bytes).await?;
    check(&bytes == b"again", "the bytes are those written")
}

async fn into_split(address: IpAddr) -> Outcome<()> {
    let (active, mut passive) = pair(address).await?;
    let (mut from, mut to) = active.into_split();
    let reader = tokio::spawn(async move {
        let mut bytes = [0; 3];
        from.read_exact(&mut bytes).await.map(|_| bytes)
    });
    to.write_all(b"ask").await?;
    let mut asked = [0; 3];
    passive.read_exact(&mut asked).await?;
    passive.write_all(b"yes").await?;
    check(&reader.await?? == b"yes", "the answer is read")
}

async fn reunite(address: IpAddr) -> Outcome<()> {
    let (one, _passive) = pair(address).await?;
    let (other, _other_passive) = pair(address).await?;
    let (from, to) = one.into_split();
    let (other_from, other_to) = other.into_split();
    check(from.reunite(other_to).is_err(), "halves of two connections")?;
    check(other_from.reunite(to).is_err(), "halves of two connections")?;
    let (mut active, mut passive) = pair(address).await?;
    let (from, to) = active.into_split();
    active = from.reunite(to)?;
    active.write_all(b"w").await?;
    check(passive.read_u8().await? == b'w', "the connection goes on")
}

async fn drop_write(address: IpAddr) -> Outcome<()> {
    let (active, mut passive) = pair(address).await?;
    let (mut from, to) = active.into_split();
    drop(to);
    check(passive.read(&mut [0]).await? == 0, "the stream ends")?;
    passive.write_all(b"r").await?;
    check(from.read_u8().await? == b'r', "the other direction goes on")
}

async fn peek(address: IpAddr) -> Outcome<()> {
    let (active, mut passive) = pair(address).await?;
    let mut bytes = [0; 8];
    check(waits(active.peek(&mut bytes)).await, "peek waits")?;
    passive.write_all(b"seen").await?;
    check(active.peek(&mut bytes).await? == 4, "four bytes")?;
    check(active.peek(&mut bytes).await? == 4, "still four bytes")?;
    let mut active = active;
    check(active.read(&mut bytes).await? == 4, "and four to read")?;
    check(&bytes[..4] == b"seen", "the same")
}

async fn shutdown(address: IpAddr) -> Outcome<()> {
    let (mut active, mut passive) = pair(address).await?;
    active.write_all(b"last").await?;
    active.shutdown().await?;
    let mut bytes = Vec::new();
    passive.read_to_end(&mut bytes).await?;
    check(bytes == b"last", "what was written arrives before the end")?;
    let broken = kind(active.write_all(b"more").await);
    check(
        broken == Some(ErrorKind::BrokenPipe),
        "no more can be written",
    )
}

async fn shutdown_twice(address: IpAddr) -> Outcome<()> {
    let (mut active, mut passive) = pair(address).await?;
    active.shutdown().await?;
    active.shutdown().await?;
    passive.shutdown().await?;
    passive.shutdown().await?;
    check(active.read(&mut [0]).await? == 0, "the stream ends")?;
    check(passive.read(&mut [0]).await? == 0, "the stream ends")?;
    active.shutdown().await?;
    Ok(())
}

async fn half_close(address: IpAddr) -> Outcome<()> {
    let (mut active, mut passive) = pair(address).await?;
    active.shutdown().await?;
    check(passive.read(&mut [0]).await? == 0, "the stream ends")?;
    let writer = tokio::spawn(async move {
        passive.write_all(&[3; 1 << 20]).await?;
        passive.shutdown().await
    });
    let mut bytes = Vec::new();
    active.read_to_end(&mut bytes).await?;
    writer.await??;
    check(bytes.len() == 1 << 20, "the other direction goes on")
}

async fn end_while_waiting(address: IpAddr) -> Outcome<()> {
    let (mut active, passive) = pair(address).await?;
    let reader = tokio::spawn(async move { active.read(&mut [0]).await });
    sleep(A_WHILE).await;
    drop(passive);
    check(reader.await?? == 0, "the reader sees the end")
}

async fn reset_while_waiting(address: IpAddr) -> Outcome<()> {
    let (mut active, mut passive) = pair(address).await?;
    // Closed with unread data, the connection is reset.
    active.write_all(b"unread").await?;
    let reader = tokio::spawn(async move { (active.read(&mut [0]).await, active) });
    sleep(A_WHILE).await;
    check(passive.read(&mut [0]).await? == 1, "one byte of several")?;
    drop(passive);
    let (read, mut active) = reader.await?;
    check(
        kind(read) == Some(ErrorKind::ConnectionReset),
        "it is reset",
    )?;
    check(active.write_all(b"!").await.is_err(), "it has ended")
}

async fn try_read(address: IpAddr) -> Outcome<()> {
    let (active, mut passive) = pair(address).await?;
    let nothing = kind(active.try_read(&mut [0; 8]));
    check(nothing == Some(ErrorKind::WouldBlock), "there is nothing")?;
    check(waits(active.readable()).await, "it is not readable")?;
    passive.write_all(b"now").await?;
    active.readable().await?;
    check(active.try_read(&mut [0; 8])? == 3, "three bytes")?;
    let nothing = kind(active.try_read(&mut [0; 8]));
    check(nothing == Some(ErrorKind::WouldBlock), "there is no more")?;
    drop(passive);
    active.readable().await?;
    check(active.try_read(&mut [0; 8])? == 0, "the stream ends")
}

async fn try_write(address: IpAddr) -> Outcome<()> {
    let (mut active, mut passive) = pair(address).await?;
    let mut sent = 0;
    loop {
        match active.try_write(&[5; 4096]) {
            Ok(length) => sent += length,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => return Err(error.into()),
        }
    }
    // More than buffers that grow can take.
    let more = vec![6; 64 << 20];
    check(waits(active.write_all(&more)).await, "a write waits")?;
    active.shutdown().await?;
    let mut bytes = Vec::new();
    passive.read_to_end(&mut bytes).await?;
    let (before, after) = bytes.split_at(sent);
    check(before.iter().all(|&byte| byte == 5), "all that was written")?;
    check(
        after.iter().all(|&byte| byte == 6),
        "and a part of the last",
    )
}

async fn read_cancelled(address: IpAddr) -> Outcome<()> {
    let (mut active, mut passive) = pair(address).await?;
    for turn in 0..20 {
        check(waits(active.read_u8()).await, "a read waits")?;
        passive.write_all(&[turn]).await?;
        check(active.read_u8().await? == turn, "nothing is lost")?;
    }
    Ok(())
}

async fn write_cancelled(address: IpAddr) -> Outcome<()> {
    let (mut active, mut passive) = pair(address).await?;
    let mut sent = 0;
    while let Ok(length) = timeout(A_WHILE, active.write(&[9; 8192])).await {
        sent += length?;
    }
    active.shutdown().await?;
    let mut bytes = Vec::new();
    passive.read_to_end(&mut bytes).await?;
    check(
        bytes.len() == sent,
        "the cancelled write has written nothing",
    )
}

/// An open that is given up leaves nothing behind that disturbs the next one.
async fn connect_cancelled(address: IpAddr) -> Outcome<()> {
    let (listener, endpoint) = listener(address).await?;
    for _ in 0..20 {
        // Polled once.
        let _ = timeout(Duration::ZERO, TcpStream::connect(endpoint)).await;
    }
    let mut active = TcpStream::connect(endpoint).await?;
    active.write_all(b"!").await?;
    let port = active.local_addr()?.port();
    loop {
        let (mut stream, peer) = listener.accept().await?;
        if peer.port() == port {
            return check(stream.read_u8().await? == b'!', "the open goes through");
        }
    }
}

/// A connection is used by one thread after the other.
async fn other_threads(address: IpAddr) -> Outcome<()> {
    let (mut active, mut passive) = pair(address).await?;
    for turn in 0..200 {
        active =
            tokio::spawn(async move { active.write_all(&[turn]).await.map(|()| active) }).await??;
        let read = tokio::spawn(async move { passive.read_u8().await.map(|byte| (byte, passive)) });
        let (byte, stream) = read.await??;
        check(byte == turn, "the byte is the one written")?;
        passive = stream;
    }
    Ok(())
}

async fn datagrams(address: IpAddr) -> Outcome<()> {
    let (one, other) = (socket(address).await?, socket(address).await?);
    let mut buffer = [0; 64];
    check(waits(one.recv_from(&mut buffer)).await, "it waits")?;
    for turn in 0..20_u8 {
        let to = other.local_addr()?;
        check(one.send_to(&[turn; 9], to).await? == 9, "it is sent")?;
        let (length, from) = other.recv_from(&mut buffer).await?;
        check(length == 9 && buffer[0] == turn, "it arrives")?;
        check(from == one.local_addr()?, "from its sender")?;
    }
    // Bytes that do not fit are lost.
    one.send_to(&[1; 9], other.local_addr()?).await?;
    check(other.recv_from(&mut buffer[..4]).await?.0 == 4, "it is cut")?;
    check(
        waits(other.recv_from(&mut buffer)).await,
        "the rest is lost",
    )
}

async fn socket(address: IpAddr) -> Outcome<UdpSocket> {
    Ok(bind(SocketAddr::new(address, 0)).await?)
}

async fn connected_datagrams(address: IpAddr) -> Outcome<()> {
    let (one, other) = (socket(address).await?, socket(address).await?);
    connect(&one, other.local_addr()?).await?;
    connect(&other, one.local_addr()?).await?;
    check(one.peer_addr()? == other.local_addr()?, "the peer is known")?;
    check(one.send(b"one").await? == 3, "it is sent")?;
    let mut buffer = [0; 8];
    check(other.recv(&mut buffer).await? == 3, "it arrives")?;
    check(other.send(b"").await? == 0, "an empty one is sent")?;
    check(one.recv(&mut buffer).await? == 0, "and arrives")
}

async fn datagrams_to_several(address: IpAddr) -> Outcome<()> {
    let (one, other) = (socket(address).await?, Arc::new(socket(address).await?));
    let receivers: Vec<_> = (0..4)
        .map(|_| {
            let other = Arc::clone(&other);
            tokio::spawn(async move { other.recv_from(&mut [0; 8]).await })
        })
        .collect();
    sleep(A_WHILE).await;
    for _ in 0..receivers.len() {
        one.send_to(b"each", other.local_addr()?).await?;
    }
    for receiver in receivers {
        check(receiver.await??.0 == 4, "each has one")?;
    }
    Ok(())
}
