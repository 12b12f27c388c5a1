//! What the server has installed for this process: extensions in the packet filter, and handlers that run in a thread of the
//! process. The next server is asked for the same, with the same maps.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::extension::{Cost, ExtensionReply, ExtensionRequest};
use portolan_proto::qos::Refusal;
use portolan_sys::map::Map;
use rustix::io::Errno;

use crate::process::Process;
use crate::process::control::Lost;
use crate::settings::complain_of;

/// All that may be still there.
static ALL: Mutex<Vec<Weak<Installed>>> = Mutex::new(Vec::new());

/// One extension, or one handler in a thread.
pub(crate) struct Installed {
    process: &'static Process,
    name: String,
    request: ExtensionRequest,
    pub(crate) cost: Cost,
    /// By name.
    pub(crate) maps: Vec<(String, Map)>,
    place: Mutex<Place>,
}

/// Where a server has put it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// None if the server refuses it.
    pub(crate) number: Option<u16>,
    /// Of a handler in a thread: the row of its statistics.
    pub(crate) row: u8,
    /// The server's incarnation.
    server: u64,
}

/// What a server has answered.
pub(crate) struct Answer {
    place: Place,
    pub(crate) cost: Cost,
    pub(crate) maps: Vec<OwnedFd>,
}

/// Why it is not installed.
pub(crate) enum NotInstalled {
    Refused(Refusal),
    Failed(Errno),
    Lost,
}

/// Requests an installation.
pub(crate) fn ask(
    process: &'static Process,
    request: ExtensionRequest,
    maps: &[BorrowedFd<'_>],
) -> Result<Answer, NotInstalled> {
    let server = process.incarnation();
    let place = |number, row| Place {
        number: Some(number),
        row,
        server,
    };
    match process.control.call(RequestBody::Extension(request), maps) {
        Ok((ReplyBody::Extension(ExtensionReply::Installed { number, cost }), maps)) => {
            Ok(Answer {
                place: place(number, 0),
                cost,
                maps,
            })
        }
        Ok((ReplyBody::Extension(ExtensionReply::Announced { number, row }), _)) => Ok(Answer {
            place: place(number, row),
            cost: Cost::default(),
            maps: Vec::new(),
        }),
        Ok((ReplyBody::Extension(ExtensionReply::Refused(refusal)), _)) => {
            Err(NotInstalled::Refused(refusal))
        }
        Ok((ReplyBody::Error { errno }, _)) => {
            Err(NotInstalled::Failed(Errno::from_raw_os_error(errno)))
        }
        Ok(_) => Err(NotInstalled::Failed(Errno::PROTO)),
        Err(Lost) => Err(NotInstalled::Lost),
    }
}

/// Remembers what was installed, for as long as the result exists.
pub(crate) fn note(
    process: &'static Process,
    (name, request): (String, ExtensionRequest),
    maps: Vec<(String, Map)>,
    Answer { place, cost, .. }: Answer,
) -> Arc<Installed> {
    let installed = Arc::new(Installed {
        process,
        name,
        request,
        cost,
        maps,
        place: Mutex::new(place),
    });
    let mut all = all();
    all.retain(|one| one.strong_count() > 0);
    all.push(Arc::downgrade(&installed));
    installed
}

/// Has the server that this process is registered with install what the one before has installed. What it refuses is lost.
/// An error if a later attempt may succeed.
pub(crate) fn install_again(process: &'static Process) -> Result<(), Errno> {
    let those: Vec<Arc<Installed>> = all().iter().filter_map(Weak::upgrade).collect();
    let of_before = |one: &&Arc<Installed>| {
        std::ptr::eq(one.process, process) && one.place().server != process.incarnation()
    };
    let mut outcome = Ok(());
    for one in those.iter().filter(of_before) {
        outcome = outcome.and(one.install_again());
    }
    outcome
}

impl fmt::Debug for Installed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {:?}", self.name, self.place())
    }
}

impl Installed {
    pub(crate) fn place(&self) -> Place {
        *self.lock()
    }

    fn lock(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Is it the calling process's? A forked child has a copy.
    pub(crate) fn is_own(&self) -> bool {
        Process::running().is_some_and(|running| std::ptr::eq(running, self.process))
    }

    fn install_again(&self) -> Result<(), Errno> {
        let maps: Vec<BorrowedFd<'_>> = self.maps.iter().map(|(_, map)| map.as_fd()).collect();
        let (errno, reason) = match ask(self.process, self.request.clone(), &maps) {
            Ok(answer) => {
                *self.lock() = answer.place;
                return Ok(());
            }
            Err(NotInstalled::Lost) => return Err(Errno::NETDOWN),
            // Too many wait to be verified.
            Err(NotInstalled::Refused(refusal)) if refusal.errno == libc::EAGAIN => {
                return Err(Errno::AGAIN);
            }
            Err(NotInstalled::Refused(refusal)) => (refusal.errno, refusal.reason),
            Err(NotInstalled::Failed(errno)) => (errno.raw_os_error(), errno.to_string()),
        };
        *self.lock() = Place {
            number: None,
            row: 0,
            server: self.process.incarnation(),
        };
        let name = &self.name;
        complain_of(&format!("extension {name:?} is lost ({errno}): {reason}"));
        Ok(())
    }
}

fn all() -> MutexGuard<'static, Vec<Weak<Installed>>> {
    ALL.lock().unwrap_or_else(PoisonError::into_inner)
}
