//! `portolan reload`: has the server read its configuration file again.

use std::os::fd::AsFd;
use std::path::PathBuf;

use anyhow::Context;
use portolan_proto::control::{Reloaded, ReplyBody, RequestBody};
use portolan_sys::shm;

use crate::ServerAddress;
use crate::exit::{Failure, print};
use crate::server::unexpected;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    server: ServerAddress,
    /// Configuration file [default: the one with which the server was started]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let path = match &arguments.config {
        Some(path) => path.clone(),
        None => file_of(&arguments.server)?,
    };
    let text = std::fs::read(&path).with_context(|| path.display().to_string())?;
    let (text, memory) = shm::pack(text)?;
    let fds: Vec<_> = memory.iter().map(AsFd::as_fd).collect();
    let request = RequestBody::Reload { text };
    match arguments.server.ask_showing(request, &fds)? {
        ReplyBody::Reloaded(Reloaded::Changed(keys)) if keys.is_empty() => {
            print("nothing has changed")
        }
        ReplyBody::Reloaded(Reloaded::Changed(keys)) => {
            print(format!("changed: {}", keys.join(", ")))
        }
        ReplyBody::Reloaded(Reloaded::Refused(reasons)) => Err(Failure::Refused(format!(
            "the configuration stays as it was:\n  {}",
            reasons.join("\n  ")
        ))),
        _ => Err(unexpected()),
    }
}

fn file_of(server: &ServerAddress) -> Result<PathBuf, Failure> {
    match server.ask(RequestBody::ReadStatus)? {
        ReplyBody::Status(status) => match status.config {
            Some(path) => Ok(path.into()),
            None => Err(Failure::Usage(anyhow::anyhow!(
                "the server was started without a file: name one by --config"
            ))),
        },
        _ => Err(unexpected()),
    }
}
