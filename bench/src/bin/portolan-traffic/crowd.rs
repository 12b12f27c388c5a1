//! Many idle connections, as load for the packet filter's look-up.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Accepts connections, writes one byte to each, and keeps them.
pub(crate) fn gather(address: SocketAddr) -> io::Result<()> {
    raise_descriptor_limit()?;
    let listener = TcpListener::bind(address)?;
    let mut streams = Vec::new();
    loop {
        let (mut stream, _) = listener.accept()?;
        stream.write_all(b"!")?;
        streams.push(stream);
    }
}

/// Opens connections to a `gather`, reports when all are accepted, and keeps them until the standard input ends.
pub(crate) fn join(address: SocketAddr, count: usize) -> io::Result<()> {
    raise_descriptor_limit()?;
    let streams = (0..count)
        .map(|_| open(address))
        .collect::<io::Result<Vec<_>>>()?;
    println!("{}", streams.len());
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn open(address: SocketAddr) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address)?;
    stream.read_exact(&mut [0])?;
    Ok(stream)
}

/// Raises the soft limit to the hard one.
fn raise_descriptor_limit() -> io::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        maximum: limit.maximum,
    };
    Ok(setrlimit(Resource::Nofile, raised)?)
}
