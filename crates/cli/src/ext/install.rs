//! `portolan ext install`: owns a port or a protocol, and installs the extension for it, until the command ends.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use portolan::extension::{Extension, Object, Port};
use portolan::qos::Refused;
use portolan::raw::{Errno, Guard, RawFlow};
use schemars::JsonSchema;
use serde::Serialize;

use super::{Arguments, CostView, read, readable, words_of};
use crate::exit::{Failure, print};
use crate::json::print_json_line;

const VARIABLE: &str = "PORTOLAN_SOCKET";

#[derive(clap::Args)]
pub(super) struct InstallArguments {
    /// The ELF object.
    object: PathBuf,
    #[command(flatten)]
    endpoint: Endpoint,
    /// The local address of the port.
    #[arg(long, default_value_t = IpAddr::V4(Ipv4Addr::UNSPECIFIED))]
    address: IpAddr,
    /// The name of the extension [default: the name of the file].
    #[arg(long)]
    name: Option<String>,
    /// The order of several extensions of one port; the lowest is called first.
    #[arg(long, default_value_t = 128)]
    priority: u8,
}

/// The packets that the extension sees.
#[derive(clap::Args)]
#[group(required = true, multiple = false)]
struct Endpoint {
    /// Packets to a UDP port.
    #[arg(long, value_name = "PORT")]
    udp: Option<u16>,
    /// Frames with an EtherType, such as 0x88b5.
    #[arg(long, value_name = "NUMBER", value_parser = ethertype)]
    ethertype: Option<u16>,
    /// Packets of an IP protocol.
    #[arg(long, value_name = "NUMBER")]
    protocol: Option<u8>,
}

/// Parses an EtherType, in hexadecimal with the prefix `0x`, or in decimal.
fn ethertype(word: &str) -> Result<u16, std::num::ParseIntError> {
    match word.strip_prefix("0x") {
        Some(digits) => u16::from_str_radix(digits, 16),
        None => word.parse(),
    }
}

/// What the command owns while it runs.
enum Own {
    Port(Port, SocketAddr),
    Protocol(RawFlow),
}

impl Own {
    fn take(request: &InstallArguments) -> Result<Own, Refused> {
        let endpoint = &request.endpoint;
        let ethertype = endpoint.ethertype.map(Guard::EtherType);
        let protocol = endpoint.protocol.map(Guard::IpProtocol);
        match ethertype.or(protocol) {
            Some(guard) => match RawFlow::open(guard) {
                Ok(flow) => Ok(Own::Protocol(flow)),
                Err(errno) => Err(Refused::new(errno, format!("cannot have {guard}: {errno}"))),
            },
            None => {
                let local = SocketAddr::new(request.address, endpoint.udp.unwrap_or_default());
                Ok(Own::Port(Port::open(local)?, local))
            }
        }
    }

    fn install(&self, name: &str, priority: u8, object: Object) -> Result<Extension, Refused> {
        match self {
            Own::Port(port, _) => port.install(name, priority, object),
            Own::Protocol(flow) => flow.install(name, priority, object),
        }
    }

    /// Receives and discards what the extension leaves to the owner. Returns when the server has gone.
    fn discard(&self) -> Errno {
        let mut buffer = vec![0; 1 << 16];
        loop {
            let taken = match self {
                Own::Port(port, _) => port.receive(&mut buffer).map(drop),
                Own::Protocol(flow) => flow.recv(None).map(drop),
            };
            match taken {
                Ok(()) | Err(Errno::INTR) => {}
                Err(errno) => return errno,
            }
        }
    }
}

impl fmt::Display for Own {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Own::Port(_, local) => write!(f, "UDP {local}"),
            Own::Protocol(flow) => write!(f, "{}", flow.guard()),
        }
    }
}

/// An extension that has just been installed.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct InstalledView {
    pub number: u16,
    pub name: String,
    pub cost: CostView,
}

pub(super) fn run(arguments: &Arguments, request: &InstallArguments) -> Result<(), Failure> {
    pass_on_socket(arguments)?;
    let object = read(&request.object)?;
    let own = Own::take(request).map_err(refused)?;
    let name = request.name();
    let extension = own
        .install(&name, request.priority, object)
        .map_err(refused)?;
    let cost = extension.cost();
    if arguments.json {
        print_json_line(&InstalledView {
            number: extension.number(),
            name,
            cost: cost.into(),
        })?;
    } else {
        let number = extension.number();
        print(format!(
            "extension {number}, {name}, on {own}: {}",
            words_of(cost)
        ))?;
    }
    Err(Failure::NoServer(own.discard().into()))
}

/// Passes `--socket` on to the library, which reads the environment.
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

impl InstallArguments {
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
