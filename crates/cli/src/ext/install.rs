//! `portolan ext install`: owns a port for as long as it runs, and the extension with it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use portolan::extension::Port;
use portolan::qos::Refused;

use super::{Arguments, json_of, read, readable, words_of};
use crate::exit::{Failure, print};

const VARIABLE: &str = "PORTOLAN_SOCKET";

#[derive(clap::Args)]
pub struct Wish {
    /// What clang made of it.
    object: PathBuf,
    /// The UDP port whose packets it is for.
    #[arg(long, value_name = "PORT")]
    udp: u16,
    /// The address of the port.
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED))]
    address: IpAddr,
    /// What it is called [default: the name of the file].
    #[arg(long)]
    name: Option<String>,
    /// Of several on one port, the lowest is called first.
    #[arg(long, default_value_t = 128)]
    priority: u8,
}

pub fn run(arguments: &Arguments, wish: &Wish) -> Result<(), Failure> {
    pass_on_socket(arguments)?;
    let object = read(&wish.object)?;
    let local = SocketAddr::new(wish.address, wish.udp);
    let port = Port::open(local).map_err(refused)?;
    let name = wish.name();
    let extension = port
        .install(&name, wish.priority, object)
        .map_err(refused)?;
    let cost = extension.cost();
    if arguments.json {
        print(serde_json::json!({
            "number": extension.number(),
            "name": name,
            "cost": json_of(cost),
        }))?;
    } else {
        let number = extension.number();
        print(format!(
            "extension {number}, {name}, on UDP {local}: {}",
            words_of(cost)
        ))?;
    }
    discard(&port)
}

/// The library finds the server by the environment.
fn pass_on_socket(arguments: &Arguments) -> Result<(), Failure> {
    let Some(socket) = &arguments.server.socket else {
        return Ok(());
    };
    if std::env::var_os(VARIABLE).is_some_and(|known| known == *socket) {
        return Ok(());
    }
    let mut again = Command::new(std::env::current_exe()?);
    Err(again
        .args(std::env::args_os().skip(1))
        .env(VARIABLE, socket)
        .exec()
        .into())
}

/// Takes what the extension leaves to its owner, until the server goes.
fn discard(port: &Port) -> Result<(), Failure> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        match port.receive(&mut buffer) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Failure::NoServer(errno.into())),
        }
    }
}

impl Wish {
    fn name(&self) -> String {
        let stem = || {
            self.object
                .file_stem()
                .map(|stem| stem.to_string_lossy().into_owned())
        };
        self.name.clone().or_else(stem).unwrap_or_default()
    }
}

fn refused(refused: Refused) -> Failure {
    Failure::Refused(readable(&refused.reason))
}
