//! What programs rely on: for instance that cancelled calls lose nothing. Tokio's own tests run on Portolan's sockets by
//! scripts/tokio-tests. Both ends are in this process.

use std::future::Future;
use std::io::{Error, ErrorKind, IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::BufMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest, copy};
use tokio::task::coop::has_budget_remaining;
use tokio::time::{sleep, timeout};

use super::{TcpListener, TcpSocket, TcpStream, UdpSocket};
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
    play("names", names()).await?;
    play("socket", configured_socket(address)).await?;
    play("options", options(address)).await?;
    play("readiness", readiness(address)).await?;
    play("several buffers", several_buffers(address)).await?;
    play("budget", budget(address)).await?;
    play("datagrams", datagrams(address)).await?;
    play("datagrams between peers", connected_datagrams(address)).await?;
    play("datagrams to several tasks", datagrams_to_several(address)).await?;
    play("datagrams without waiting", datagrams_at_once(address)).await?;
    play("datagrams peeked at", datagrams_peeked_at(address)).await?;
    play("groups", groups(address)).await?;
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
    let listener = TcpListener::bind(SocketAddr::new(address, 0)).await?;
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

/// Both ends try all addresses of the name.
async fn names() -> Outcome<()> {
    let listener = TcpListener::bind("localhost:0").await?;
    let port = listener.local_addr()?.port();
    let active = TcpStream::connect(("localhost", port)).await?;
    let (passive, peer) = listener.accept().await?;
    check(peer == active.local_addr()?, "the peer is the client")?;
    check(passive.peer_addr()? == peer, "and stays it")?;
    let unknown = TcpStream::connect("no-such-host.invalid:1").await;
    check(unknown.is_err(), "an unknown name is an error")
}

/// A socket keeps the options and the address that it was given before it connects or listens.
async fn configured_socket(address: IpAddr) -> Outcome<()> {
    let open = || match address {
        IpAddr::V4(_) => TcpSocket::new_v4(),
        IpAddr::V6(_) => TcpSocket::new_v6(),
    };
    let any_port = SocketAddr::new(address, 0);
    let passive = open()?;
    passive.set_reuseaddr(true)?;
    passive.bind(any_port)?;
    let listener = passive.listen(16)?;
    let active = open()?;
    active.set_nodelay(true)?;
    active.set_keepalive(true)?;
    active.bind(any_port)?;
    let bound = active.local_addr()?;
    let active = active.connect(listener.local_addr()?).await?;
    let (_, peer) = listener.accept().await?;
    check(active.local_addr()? == bound, "the address is kept")?;
    check(peer == bound, "and seen by the peer")?;
    check(active.nodelay()?, "the option is kept")
}

async fn options(address: IpAddr) -> Outcome<()> {
    let (active, _passive) = pair(address).await?;
    check(active.linger()?.is_none(), "closing does not wait")?;
    active.set_zero_linger()?;
    check(active.linger()? == Some(Duration::ZERO), "it resets")?;
    active.set_ttl(33)?;
    check(active.ttl()? == 33, "the time to live is set")?;
    let socket = socket(address).await?;
    check(!socket.broadcast()?, "no broadcasts")?;
    socket.set_broadcast(true)?;
    check(socket.broadcast()?, "broadcasts")?;
    check(socket.device()?.is_none(), "all devices")?;
    socket.bind_device(Some(b"lo"))?;
    check(socket.device()?.as_deref() == Some(b"lo"), "one device")
}

/// What a connection is ready for, at its start and its end.
async fn readiness(address: IpAddr) -> Outcome<()> {
    let (active, mut passive) = pair(address).await?;
    check(waits(active.ready(Interest::READABLE)).await, "it waits")?;
    let both = Interest::READABLE | Interest::WRITABLE;
    let ready = active.ready(both).await?;
    check(
        ready.is_writable() && !ready.is_readable(),
        "it is writable",
    )?;
    passive.write_all(b"now").await?;
    let ready = active.ready(Interest::READABLE).await?;
    check(
        ready.is_readable() && !ready.is_read_closed(),
        "it is readable",
    )?;
    let taken = active.try_io(Interest::READABLE, || Ok(7))?;
    check(taken == 7, "the program's own call is made")?;
    drop(passive);
    while !active.ready(Interest::READABLE).await?.is_read_closed() {
        sleep(Duration::from_millis(1)).await;
    }
    check(
        active.try_read(&mut [0; 8])? == 3,
        "the bytes are still there",
    )?;
    let called = active.async_io(Interest::READABLE, || Ok(())).await;
    check(called.is_ok(), "the end does not wait either")
}

async fn several_buffers(address: IpAddr) -> Outcome<()> {
    let (active, passive) = pair(address).await?;
    passive.writable().await?;
    let parts = [IoSlice::new(b"some"), IoSlice::new(b"where")];
    check(passive.try_write_vectored(&parts)? == 9, "all is written")?;
    let mut bytes = Vec::new();
    while bytes.len() < 6 {
        active.readable().await?;
        match active.try_read_buf(&mut (&mut bytes).limit(6)) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error.into()),
        }
    }
    let (mut one, mut other) = ([0; 2], [0; 8]);
    let mut parts = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut other)];
    check(
        active.try_read_vectored(&mut parts)? == 3,
        "the rest is read",
    )?;
    check(bytes == b"somewh", "the first bytes")?;
    check(&one == b"er" && other[0] == b'e', "and the last")
}

/// A task whose calls never wait lets the others run nevertheless.
async fn budget(address: IpAddr) -> Outcome<()> {
    let (mut active, _passive) = pair(address).await?;
    for _ in 0..1000 {
        if !has_budget_remaining() {
            return Ok(());
        }
        active.write_all(b"!").await?;
    }
    check(false, "the calls use up the budget")
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
    Ok(UdpSocket::bind(SocketAddr::new(address, 0)).await?)
}

async fn connected_datagrams(address: IpAddr) -> Outcome<()> {
    let (one, other) = (socket(address).await?, socket(address).await?);
    one.connect(other.local_addr()?).await?;
    other.connect(one.local_addr()?).await?;
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

async fn datagrams_at_once(address: IpAddr) -> Outcome<()> {
    let (one, other) = (socket(address).await?, socket(address).await?);
    let nothing = kind(other.try_recv_from(&mut [0; 8]));
    check(nothing == Some(ErrorKind::WouldBlock), "there is nothing")?;
    check(waits(other.readable()).await, "it is not readable")?;
    one.writable().await?;
    one.try_send_to(b"once", other.local_addr()?)?;
    other.readable().await?;
    let mut bytes = b"at ".to_vec();
    let (length, from) = other.try_recv_buf_from(&mut bytes)?;
    check(length == 4 && bytes == b"at once", "it is appended")?;
    check(from == one.local_addr()?, "from its sender")?;
    one.send_to(&[8; 3000], other.local_addr()?).await?;
    let mut bytes = Vec::with_capacity(4096);
    check(other.recv_buf(&mut bytes).await? == 3000, "a long one")
}

async fn datagrams_peeked_at(address: IpAddr) -> Outcome<()> {
    let (one, other) = (socket(address).await?, socket(address).await?);
    one.send_to(b"seen", other.local_addr()?).await?;
    check(
        other.peek_sender().await? == one.local_addr()?,
        "its sender",
    )?;
    let mut buffer = [0; 8];
    check(other.peek(&mut buffer).await? == 4, "its length")?;
    check(other.try_peek_from(&mut buffer)?.0 == 4, "once more")?;
    check(other.recv(&mut buffer).await? == 4, "it is still there")?;
    check(&buffer[..4] == b"seen", "its bytes")
}

/// A socket is a member of a group until it leaves it.
async fn groups(address: IpAddr) -> Outcome<()> {
    let socket = socket(address).await?;
    join(&socket, address)?;
    let twice = kind(join(&socket, address));
    check(twice == Some(ErrorKind::AddrInUse), "it is a member")?;
    leave(&socket, address)?;
    let twice = kind(leave(&socket, address));
    check(
        twice == Some(ErrorKind::AddrNotAvailable),
        "it is no member",
    )?;
    Ok(join(&socket, address)?)
}

const GROUP_V4: Ipv4Addr = Ipv4Addr::new(239, 77, 0, 1);
const GROUP_V6: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x77);

fn join(socket: &UdpSocket, address: IpAddr) -> std::io::Result<()> {
    match address {
        IpAddr::V4(device) => socket.join_multicast_v4(GROUP_V4, device),
        IpAddr::V6(_) => socket.join_multicast_v6(&GROUP_V6, 0),
    }
}

fn leave(socket: &UdpSocket, address: IpAddr) -> std::io::Result<()> {
    match address {
        IpAddr::V4(device) => socket.leave_multicast_v4(GROUP_V4, device),
        IpAddr::V6(_) => socket.leave_multicast_v6(&GROUP_V6, 0),
    }
}
