//! How the servers of one machine exchange their CPU promises: a directory with a file for each server, locked while it
//! runs, with what it has promised and what it would give if it were alone. A server makes promises only while it holds
//! a common lock, so that nothing is promised twice. The file of a dead server is unlocked, which is visible across PID
//! namespaces, too; the next server that finds it removes it.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use portolan_control::qos::cpu::CpuLoad;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::geteuid;

/// Servers hold the lock for a few system calls.
const TIMEOUT: u32 = 20;
const PAUSE: Duration = Duration::from_millis(1);

/// The file with the common lock.
const LOCK: &str = "lock";
/// Maximum length of a server's file.
const LONGEST: u64 = 64;

/// This server's access to the exchange.
#[derive(Debug)]
pub(super) struct Ledger {
    folder: PathBuf,
    lock: File,
    own: Option<Own>,
}

/// The file of this server, while it promises anything.
#[derive(Debug)]
struct Own {
    path: PathBuf,
    file: File,
}

impl Ledger {
    /// Opens the directory. One that others can write to is refused, since its contents could be false.
    pub(super) fn open(folder: &Path) -> io::Result<Ledger> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(folder)?;
        let status = fs::symlink_metadata(folder)?;
        let is_own = status.is_dir() && status.uid() == geteuid().as_raw();
        if !is_own || status.mode() & 0o022 != 0 {
            return Err(io::Error::other("others may write there"));
        }
        let lock = file_options().create(true).open(folder.join(LOCK))?;
        Ok(Ledger {
            folder: folder.to_owned(),
            lock,
            own: None,
        })
    }

    /// Passes the others' load to `decide`, and publishes the load of this server that results.
    pub(super) fn exchange<T>(
        &mut self,
        decide: impl FnOnce(CpuLoad) -> (T, CpuLoad),
    ) -> io::Result<T> {
        self.take_lock()?;
        let done = self.exchange_locked(decide);
        flock(&self.lock, FlockOperation::Unlock)?;
        done
    }

    /// Takes the lock, without waiting for long: a server that is stopped while it holds the lock must not block
    /// others.
    fn take_lock(&self) -> io::Result<()> {
        for _ in 0..TIMEOUT {
            match flock(&self.lock, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) => sleep(PAUSE),
                taken => return Ok(taken?),
            }
        }
        Err(io::Error::other("another server has the lock for long"))
    }

    fn exchange_locked<T>(
        &mut self,
        decide: impl FnOnce(CpuLoad) -> (T, CpuLoad),
    ) -> io::Result<T> {
        let others = CpuLoad::sum(self.others()?);
        let (decided, standing) = decide(others);
        if standing == CpuLoad::default() {
            self.withdraw()
        } else {
            self.say(standing)?
        }
        Ok(decided)
    }

    fn others(&self) -> io::Result<Vec<CpuLoad>> {
        let own = self.own.as_ref().map(|own| own.path.as_path());
        let mut others = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let path = entry?.path();
            if Some(path.as_path()) != own && !path.ends_with(LOCK) {
                others.extend(standing_in(&path)?);
            }
        }
        Ok(others)
    }

    fn say(&mut self, standing: CpuLoad) -> io::Result<()> {
        let own = match &mut self.own {
            Some(own) => own,
            none => none.insert(Own::create(&self.folder)?),
        };
        let text = format!(
            "{:020} {:020}\n",
            standing.promised_ppm, standing.wanted_ppm
        );
        own.file.write_all_at(text.as_bytes(), 0)
    }

    fn withdraw(&mut self) {
        if let Some(own) = self.own.take() {
            let _ = fs::remove_file(own.path);
        }
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.withdraw();
    }
}

impl Own {
    /// Creates the file under the first free number.
    fn create(folder: &Path) -> io::Result<Own> {
        for number in 1_u32.. {
            let path = folder.join(number.to_string());
            match file_options().create_new(true).open(&path) {
                Ok(file) => {
                    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
                    return Ok(Own { path, file });
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::StorageFull.into())
    }
}

fn file_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    options
}

/// Returns what a server has written in its file; none if the server has died.
fn standing_in(path: &Path) -> io::Result<Option<CpuLoad>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => {
            fs::remove_file(path)?;
            Ok(None)
        }
        Err(Errno::WOULDBLOCK) => {
            let mut text = String::new();
            file.take(LONGEST).read_to_string(&mut text)?;
            parse(&text).map(Some)
        }
        Err(errno) => Err(errno.into()),
    }
}

fn parse(text: &str) -> io::Result<CpuLoad> {
    let mut numbers = text.split_ascii_whitespace().map(str::parse);
    match (numbers.next(), numbers.next(), numbers.next()) {
        (Some(Ok(promised_ppm)), Some(Ok(wanted_ppm)), None) => Ok(CpuLoad {
            promised_ppm,
            wanted_ppm,
        }),
        _ => Err(io::Error::other("a file says no two numbers")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let name = format!("portolan-ledger-{}-{name}", std::process::id());
            Folder(std::env::temp_dir().join(name))
        }

        fn files(&self) -> usize {
            fs::read_dir(&self.0).unwrap().count()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn standing(promised_ppm: u64, wanted_ppm: u64) -> CpuLoad {
        CpuLoad {
            promised_ppm,
            wanted_ppm,
        }
    }

    fn say(ledger: &mut Ledger, own: CpuLoad) -> CpuLoad {
        ledger.exchange(|others| (others, own)).unwrap()
    }

    #[test]
    fn each_server_hears_what_all_others_have() {
        let folder = Folder::new("each");
        let [mut one, mut two, mut three] = [(); 3].map(|()| Ledger::open(&folder.0).unwrap());
        assert_eq!(say(&mut one, standing(1, 10)), CpuLoad::default());
        assert_eq!(say(&mut two, standing(2, 20)), standing(1, 10));
        assert_eq!(say(&mut three, standing(3, 30)), standing(3, 30));
        assert_eq!(say(&mut one, standing(0, 0)), standing(5, 50));
        assert_eq!(say(&mut two, standing(2, 20)), standing(3, 30));
        drop(three);
        assert_eq!(say(&mut two, CpuLoad::default()), CpuLoad::default());
        assert_eq!(folder.files(), 1, "nothing is left but the lock");
    }

    #[test]
    fn what_a_dead_server_has_said_is_free() {
        let folder = Folder::new("dead");
        let mut live = Ledger::open(&folder.0).unwrap();
        for number in ["1", "2"] {
            fs::write(folder.0.join(number), "900000 900000\n").unwrap();
        }
        assert_eq!(say(&mut live, standing(7, 8)), CpuLoad::default());
        assert_eq!(folder.files(), 2);
    }

    #[test]
    fn who_cannot_hear_the_others_is_told_and_says_nothing() {
        let folder = Folder::new("deaf");
        let [mut one, mut two] = [(); 2].map(|()| Ledger::open(&folder.0).unwrap());
        say(&mut one, standing(1, 1));
        fs::write(folder.0.join("1"), "much").unwrap();
        let decided = two.exchange(|_| ((), standing(1, 1)));
        assert!(decided.unwrap_err().to_string().contains("two numbers"));
        assert_eq!(folder.files(), 2);
        flock(&one.lock, FlockOperation::NonBlockingLockExclusive).unwrap();
        let decided = two.exchange(|_| ((), standing(1, 1)));
        assert!(decided.unwrap_err().to_string().contains("for long"));
    }

    #[test]
    fn a_folder_that_others_may_write_into_is_refused() {
        use std::os::unix::fs::PermissionsExt;

        let folder = Folder::new("open");
        fs::create_dir(&folder.0).unwrap();
        fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Ledger::open(&folder.0).is_err());
    }
}
