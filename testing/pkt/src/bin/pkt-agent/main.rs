//! `pkt-agent`: makes the calls of a script and reports their outcomes. If it is started directly, its
//! sockets are the kernel's; with the preload library they are Portolan's.

mod options;

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::sync::{Mutex, PoisonError};

use portolan_pkt::agent::{Answer, Request, Value};
use portolan_pkt::segment::pattern;
use portolan_pkt::wire::now;
use portolan_posix_check::call::{self, Errno, Fd};

/// The results of a call.
#[derive(Default)]
struct Found {
    number: i64,
    data: Option<Vec<u8>>,
    words: Vec<String>,
}

type Made = Result<Found, Errno>;

/// Bytes sent so far on each stream; datagram sockets have no entry.
static STREAMS: Mutex<Option<HashMap<Fd, u64>>> = Mutex::new(None);

fn main() {
    // Rust's start-up code ignores SIGPIPE, so that calls return EPIPE.
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match serde_json::from_str::<Request>(&line) {
            Ok(request) => {
                std::thread::spawn(move || serve(&request));
            }
            Err(error) => eprintln!("pkt-agent: {error}"),
        }
    }
}

fn serve(request: &Request) {
    let started = now();
    let made = make(&request.call, &request.arguments);
    let ended = now();
    let (result, found) = match made {
        Ok(found) => (Ok(found.number), found),
        Err(errno) => (Err(errno.0), Found::default()),
    };
    let answer = Answer {
        id: request.id,
        started,
        ended,
        result,
        data: found.data,
        words: found.words,
    };
    if let Ok(mut line) = serde_json::to_vec(&answer) {
        line.push(b'\n');
        let mut output = std::io::stdout().lock();
        // Fails if the runner has ended.
        let _ = output.write_all(&line).and_then(|()| output.flush());
    }
}

fn make(name: &str, arguments: &[Value]) -> Made {
    use Value::{Address, Number, Words};
    match (name, arguments) {
        ("socket", [Words(kind)]) => socket(kind),
        ("bind", [Number(fd), Address(address)]) => plain(call::bind(fd_of(*fd), *address)),
        ("listen", [Number(fd), Number(backlog)]) => {
            plain(call::listen(fd_of(*fd), *backlog as i32))
        }
        ("connect", [Number(fd), Address(to)]) => plain(call::connect(fd_of(*fd), *to)),
        ("disconnect", [Number(fd)]) => plain(call::disconnect(fd_of(*fd))),
        ("accept", [Number(fd)]) => {
            let (accepted, _) = call::accept(fd_of(*fd), 0)?;
            begin_stream(accepted);
            number(accepted.into())
        }
        ("nonblock", [Number(fd)]) => nonblock(fd_of(*fd)),
        ("send", [Number(fd), data, flags @ ..]) => send(fd_of(*fd), data, None, flags),
        ("sendto", [Number(fd), Address(to), data, flags @ ..]) => {
            send(fd_of(*fd), data, Some(*to), flags)
        }
        ("recv", [Number(fd), Number(most), flags @ ..]) => receive(fd_of(*fd), *most, flags),
        ("recvmsg", [Number(fd), Number(most), flags @ ..]) => {
            receive_message(fd_of(*fd), *most, flags)
        }
        ("shutdown", [Number(fd), Words(how)]) => shutdown(fd_of(*fd), how),
        ("close", [Number(fd)]) => plain(call::close(fd_of(*fd))),
        ("exit", []) => std::process::exit(0),
        ("setsockopt", [Number(fd), Words(option), value @ ..]) => {
            options::set(fd_of(*fd), option, value)
        }
        ("getsockopt", [Number(fd), Words(option)]) => options::get(fd_of(*fd), option),
        ("tcp_info", [Number(fd), Words(field)]) => options::tcp_info(fd_of(*fd), field),
        ("ioctl", [Number(fd), Words(request)]) => ioctl(fd_of(*fd), request),
        ("poll", [Number(fd), Words(events), time @ ..]) => poll(fd_of(*fd), events, time),
        ("watch_urgent", [Number(fd)]) => watch_urgent(fd_of(*fd)),
        ("urgent_signals", []) => number(call::Counted.so_far().into()),
        _ => Err(Errno(libc::ENOSYS)),
    }
}

fn fd_of(number: i64) -> Fd {
    number as Fd
}

fn number(number: i64) -> Made {
    Ok(Found {
        number,
        ..Found::default()
    })
}

fn plain(answer: Result<i32, Errno>) -> Made {
    number(answer?.into())
}

fn begin_stream(fd: Fd) {
    let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    streams.get_or_insert_default().insert(fd, 0);
}

fn socket(kind: &[String]) -> Made {
    let has = |word: &str| kind.iter().any(|other| other == word);
    let domain = if has("v6") {
        libc::AF_INET6
    } else {
        libc::AF_INET
    };
    let fd = if has("udp") {
        call::socket(domain, libc::SOCK_DGRAM, 0)?
    } else {
        let fd = call::socket(domain, libc::SOCK_STREAM, 0)?;
        // Portolan's default, whatever the machine's default is.
        options::set_congestion(fd, b"cubic")?;
        begin_stream(fd);
        fd
    };
    if has("nonblock") {
        nonblock(fd)?;
    }
    number(fd.into())
}

fn nonblock(fd: Fd) -> Made {
    let flags = call::fcntl(fd, libc::F_GETFL, 0)?;
    plain(call::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK))
}

fn send(fd: Fd, data: &Value, to: Option<SocketAddr>, flags: &[Value]) -> Made {
    let sent_before = {
        let streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
        streams
            .as_ref()
            .and_then(|streams| streams.get(&fd).copied())
    };
    let first = sent_before.unwrap_or(0);
    let bytes: Vec<u8> = match data {
        Value::Text(text) => text.clone(),
        Value::Number(length) => (first..first + *length as u64).map(pattern).collect(),
        _ => return Err(Errno(libc::ENOSYS)),
    };
    let flags = message_flags(flags)?;
    let sent = match to {
        Some(to) => call::send_to(fd, &bytes, flags, to)?,
        None => call::send(fd, &bytes, flags)?,
    };
    let mut streams = STREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(count) = streams.as_mut().and_then(|streams| streams.get_mut(&fd)) {
        *count += sent as u64;
    }
    number(sent as i64)
}

fn receive(fd: Fd, most: i64, flags: &[Value]) -> Made {
    let mut buffer = vec![0; most as usize];
    let count = call::receive(fd, &mut buffer, message_flags(flags)?)?;
    // With MSG_TRUNC the count may exceed the buffer.
    buffer.truncate(count);
    Ok(Found {
        number: count as i64,
        data: Some(buffer),
        words: Vec::new(),
    })
}

fn receive_message(fd: Fd, most: i64, flags: &[Value]) -> Made {
    let mut buffer = vec![0; most as usize];
    let message = call::receive_message(fd, &mut [&mut buffer], message_flags(flags)?)?;
    buffer.truncate(message.length);
    let known = [
        (libc::MSG_TRUNC, "trunc"),
        (libc::MSG_OOB, "oob"),
        (libc::MSG_ERRQUEUE, "errqueue"),
    ];
    let words = known.iter().filter(|(flag, _)| message.flags & flag != 0);
    Ok(Found {
        number: message.length as i64,
        words: words.map(|(_, word)| (*word).to_owned()).collect(),
        data: Some(buffer),
    })
}

fn message_flags(flags: &[Value]) -> Result<i32, Errno> {
    let [Value::Words(words)] = flags else {
        return Ok(libc::MSG_NOSIGNAL);
    };
    let known = |word: &String| {
        Ok(match word.as_str() {
            "none" => 0,
            "MSG_PEEK" => libc::MSG_PEEK,
            "MSG_OOB" => libc::MSG_OOB,
            "MSG_DONTWAIT" => libc::MSG_DONTWAIT,
            "MSG_WAITALL" => libc::MSG_WAITALL,
            "MSG_MORE" => libc::MSG_MORE,
            "MSG_EOR" => libc::MSG_EOR,
            "MSG_TRUNC" => libc::MSG_TRUNC,
            "MSG_FASTOPEN" => libc::MSG_FASTOPEN,
            "MSG_ERRQUEUE" => libc::MSG_ERRQUEUE,
            _ => return Err(Errno(libc::ENOSYS)),
        })
    };
    words
        .iter()
        .try_fold(libc::MSG_NOSIGNAL, |flags, word| Ok(flags | known(word)?))
}

fn shutdown(fd: Fd, how: &[String]) -> Made {
    let how = match how.first().map(String::as_str) {
        Some("rd") => libc::SHUT_RD,
        Some("wr") => libc::SHUT_WR,
        _ => libc::SHUT_RDWR,
    };
    plain(call::shutdown(fd, how))
}

fn ioctl(fd: Fd, request: &[String]) -> Made {
    let request = match request.first().map(String::as_str) {
        Some("SIOCINQ") => libc::FIONREAD,
        Some("SIOCOUTQ") => libc::TIOCOUTQ,
        // From <linux/sockios.h>; missing in libc.
        Some("SIOCATMARK") => 0x8905,
        Some("SIOCOUTQNSD") => 0x894b,
        _ => return Err(Errno(libc::ENOSYS)),
    };
    plain(call::ioctl(fd, request, 0))
}

const EVENTS: [(&str, i16); 7] = [
    ("in", libc::POLLIN),
    ("out", libc::POLLOUT),
    ("pri", libc::POLLPRI),
    ("rdhup", libc::POLLRDHUP),
    ("err", libc::POLLERR),
    ("hup", libc::POLLHUP),
    ("nval", libc::POLLNVAL),
];

fn poll(fd: Fd, wanted: &[String], time: &[Value]) -> Made {
    let asked = EVENTS
        .iter()
        .filter(|(name, _)| wanted.iter().any(|w| w == name));
    let mask = asked.fold(0, |mask, (_, event)| mask | event);
    let milliseconds = match time {
        [Value::Number(milliseconds)] => *milliseconds as i32,
        _ => 0,
    };
    let (count, found) = call::poll(&[(fd, mask)], milliseconds)?;
    let found = EVENTS.iter().filter(|(_, event)| found[0] & event != 0);
    Ok(Found {
        number: count.into(),
        data: None,
        words: found.map(|(name, _)| (*name).to_owned()).collect(),
    })
}

/// Counts SIGURG signals for `fd`.
fn watch_urgent(fd: Fd) -> Made {
    call::count_signals(libc::SIGURG, libc::SA_RESTART);
    plain(call::fcntl(fd, libc::F_SETOWN, std::process::id() as i32))
}
