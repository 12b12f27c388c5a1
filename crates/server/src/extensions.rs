//! Protocol extensions: who may install one where, its state, and its removal. The code is checked
//! and linked by `portolan_control::extensions`, verified by the kernel in a thread of its own, and
//! called by the managers in the packet filter (ADR 14).

mod loader;
mod serve;
mod threaded;

use std::collections::{BTreeMap, HashMap};

use portolan_bpf::Linkage;
use portolan_control::ClientId;
use portolan_control::extensions::{Domain, Table, TableEntry};
use portolan_proto::extension::{Cost, Event, ExtensionState, Guard};
use portolan_proto::qos::Refusal;
use portolan_types::ChannelId;
use rustix::io::Errno;

use self::loader::Loader;
use self::threaded::ThreadedHandlers;
use crate::config::ExtensionConfig;

/// All extensions of this server.
pub(crate) struct Extensions {
    table: Table,
    installed: BTreeMap<u16, Installed>,
    pub loader: Loader,
    threaded: ThreadedHandlers,
    /// Bytes of maps given to processes, which may keep them as long as they live.
    memory: HashMap<ChannelId, u64>,
    domain: Domain,
    config: ExtensionConfig,
}

/// The data of an extension besides its entry in the table.
struct Installed {
    guards: Vec<Guard>,
    name: String,
    pid: u32,
    event: Event,
    standing: ExtensionState,
    cost: Cost,
}

/// What to do with verified code, and which client gets the answer.
#[derive(Clone, Debug)]
struct LoadRequest {
    client: ClientId,
    request: u32,
    /// None if the code is only to be checked.
    place: Option<InstallPoint>,
}

/// Where an extension is to be installed.
#[derive(Clone, Debug)]
struct InstallPoint {
    guards: Vec<Guard>,
    name: String,
    event: Event,
    entry: TableEntry,
}

type Outcome<T> = Result<T, Refusal>;

fn refuse<T>(errno: i32, reason: impl Into<String>) -> Outcome<T> {
    Err(Refusal {
        errno,
        reason: reason.into(),
    })
}

impl Extensions {
    pub(crate) fn new(
        linkage: std::sync::Arc<Linkage>,
        config: ExtensionConfig,
    ) -> Result<Extensions, Errno> {
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
        Ok(Extensions {
            table: Table::default(),
            installed: BTreeMap::new(),
            loader: Loader::start(linkage, config.instructions)?,
            threaded: ThreadedHandlers::default(),
            memory: HashMap::new(),
            domain: Domain::of_handlers(processors),
            config,
        })
    }

    fn has_memory(&self, channel: ChannelId, more: u64) -> Outcome<()> {
        let most = self.config.memory_per_process;
        let taken = self.memory.get(&channel).copied().unwrap_or(0);
        if taken + more > most {
            refuse(
                libc::EDQUOT,
                format!(
                    "its maps take {more} bytes; the process was given {taken} of {most} already"
                ),
            )
        } else {
            Ok(())
        }
    }
}
