//! `portolan ext`: installs, lists, checks and removes protocol extensions. The server admits them; the reason of a
//! refusal is printed as the server gave it.

mod install;
mod show;

use std::path::{Path, PathBuf};

use anyhow::Context;
use portolan::extension::Object;
use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::extension::{Cost, ExtensionReply, ExtensionReport, ExtensionRequest};
use schemars::JsonSchema;
use serde::Serialize;

pub(crate) use self::install::InstalledView;
pub(crate) use self::show::{ExtensionView, StatisticsView};

use crate::ServerAddress;
use crate::exit::{Failure, print};
use crate::json::print_json;
use crate::server::unexpected;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    server: ServerAddress,
    /// Print JSON.
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Install an extension, and keep it until this command ends.
    ///
    /// The command owns the port or the protocol. Packets that the extension leaves to the owner are discarded; a
    /// program that wants them uses the interface in portolan/install.h, or portolan::extension in Rust.
    Install(install::InstallArguments),
    /// List the extensions of the caller; for root, all.
    List,
    /// Show how often each extension ran, how long it took, and what it decided.
    Stats {
        /// The number of one extension.
        number: Option<u16>,
    },
    /// Remove an extension.
    Remove {
        /// The number that `ext list` shows.
        number: u16,
    },
    /// Show whether the server would admit an extension, and its cost.
    Check {
        /// The ELF object.
        object: PathBuf,
    },
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    match &arguments.command {
        Command::Install(request) => install::run(arguments, request),
        Command::List => show::list(arguments, &arguments.extensions()?),
        Command::Stats { number } => show::statistics(arguments, &arguments.extensions()?, *number),
        Command::Remove { number } => arguments
            .ask(ExtensionRequest::Remove { number: *number })
            .map(drop),
        Command::Check { object } => check(arguments, object),
    }
}

impl Arguments {
    fn ask(&self, request: ExtensionRequest) -> Result<ExtensionReply, Failure> {
        match self.server.ask(RequestBody::Extension(request))? {
            ReplyBody::Extension(ExtensionReply::Refused(refusal)) => {
                Err(Failure::Refused(readable(&refusal.reason)))
            }
            ReplyBody::Extension(reply) => Ok(reply),
            _ => Err(unexpected()),
        }
    }

    fn extensions(&self) -> Result<Vec<ExtensionReport>, Failure> {
        self.server.ask_for(
            RequestBody::Extension(ExtensionRequest::List),
            |reply| match reply {
                ReplyBody::Extension(ExtensionReply::List(list)) => Some(list),
                _ => None,
            },
        )
    }
}

/// Keeps the line breaks of the verifier's log, and replaces all other control characters.
fn readable(reason: &str) -> String {
    let lines: Vec<String> = reason.lines().map(crate::table::printable).collect();
    lines.join("\n")
}

fn read(path: &Path) -> Result<Object, Failure> {
    let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
    let object = Object::parse(&bytes).with_context(|| path.display().to_string());
    object.map_err(Failure::General)
}

fn check(arguments: &Arguments, path: &Path) -> Result<(), Failure> {
    let code = read(path)?.into_code();
    match arguments.ask(ExtensionRequest::Check(code))? {
        ExtensionReply::Checked(cost) if arguments.json => print_json(&CostView::from(cost)),
        ExtensionReply::Checked(cost) => print(format!("admitted: {}", words_of(cost))),
        _ => Err(unexpected()),
    }
}

/// The resources that an extension needs.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct CostView {
    pub instructions: u32,
    /// Instructions that the kernel's verifier processed.
    pub verified: u32,
    /// Bytes of its maps.
    pub memory: u64,
}

impl From<Cost> for CostView {
    fn from(cost: Cost) -> CostView {
        CostView {
            instructions: cost.instructions,
            verified: cost.verified,
            memory: cost.memory,
        }
    }
}

fn words_of(cost: Cost) -> String {
    let Cost {
        instructions,
        verified,
        memory,
    } = cost;
    format!("{instructions} instructions, {verified} verified, {memory} bytes of maps")
}
