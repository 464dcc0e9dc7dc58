//! File systems on the recorded disk: cut off their power, and with calls that fail.

use crate::calls::acked;
use crate::disk::{Disk, Failing, Leaves, Recording};
use crate::script::{Ended, Step};
use crate::system::{Fs, Mounted, said, this};
use std::fs;
use std::path::{Path, PathBuf};

/// What can be missing for a disk of this kind.
pub fn missing() -> Option<String> {
    (!Path::new("/dev/fuse").exists()).then(|| "there is no FUSE device".to_owned())
}

/// A worker's script on a file system of its own.
pub struct Bench {
    room: PathBuf,
    fs: Fs,
    seed: u64,
    steps: Vec<Step>,
}

impl Bench {
    pub fn new(room: &Path, fs: Fs, seed: u64, steps: Vec<Step>) -> Result<Bench, String> {
        fs.make(&room.join("made"), false)?;
        Ok(Bench { room: room.to_owned(), fs, seed, steps })
    }

    fn attach(&self) -> Result<(Disk, Mounted), String> {
        fs::write(self.acks(), [0; 8]).map_err(|e| e.to_string())?;
        let disk = Disk::new(&self.room.join("made"), &self.acks())?;
        let mounted = Mounted::image(&disk.path())?;
        Ok((disk, mounted))
    }

    fn acks(&self) -> PathBuf {
        self.room.join("acks")
    }

    /// Runs the worker with the threads of a service.
    fn work(&self, mounted: &Mounted) -> Result<Ended, String> {
        let mut worker = this("worker")?;
        worker.arg(mounted.path().join("data")).arg(self.acks());
        worker.args([self.seed.to_string(), self.steps.len().to_string(), "--threads".to_owned()]);
        let output = worker.output().map_err(|e| format!("worker: {e}"))?;
        if output.status.code() == Some(3) {
            return Err(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        match Ended::parse(&String::from_utf8_lossy(&output.stdout)) {
            Ended::Killed => Err(format!("the worker died: {}", String::from_utf8_lossy(&output.stderr))),
            ended => Ok(ended),
        }
    }

    /// A process that looks, so that none of ours has a file open on what is to be unmounted.
    fn check(&self, data: &Path, acked: usize, exact: bool) -> Result<String, String> {
        let mut check = this("check")?;
        check.arg(data).args([self.seed, self.steps.len() as u64, acked as u64].map(|n| n.to_string()));
        said(if exact { check.arg("--exact") } else { &mut check })
    }

    /// Runs the script to its end, and records what it did to the disk.
    pub fn record(&self) -> Result<Recording, String> {
        let (disk, mounted) = self.attach()?;
        let ended = self.work(&mounted)?;
        if ended != Ended::Whole {
            return Err(format!("the script does not run by itself: {ended:?}"));
        }
        mounted.unmount()?;
        Ok(disk.into_recording())
    }

    /// Cuts the power somewhere, mounts what is left and holds the store in it to what was answered. How many
    /// blocks were in doubt.
    pub fn cut(&self, recording: &Recording, seed: u64, lies: bool) -> Result<usize, String> {
        let mut random = fastrand::Rng::with_seed(seed);
        let cut = random.usize(recording.first_cut()..=recording.events());
        let leaves = Leaves::ALL[seed as usize % Leaves::ALL.len()];
        let image = recording.image(cut, leaves, lies, &mut random);
        let path = self.room.join("image");
        image.write(&path).map_err(|e| e.to_string())?;
        let what = format!(
            "{}, image {seed}: cut before event {cut} of {}, {leaves:?} left of {} blocks, {} kept",
            self.fs.name(),
            recording.events(),
            image.pending,
            image.kept
        );
        let mounted = Mounted::image(&path).map_err(|e| format!("{what}: it does not mount: {e}"))?;
        let checked = self.check(&mounted.path().join("data"), image.acked, false);
        let unmounted = mounted.unmount();
        self.forget();
        checked.and(unmounted).map_err(|e| format!("{what}: {e}"))?;
        Ok(image.pending)
    }

    /// Has writes or flushes of the disk fail once so many steps were answered: the store is held to its answers
    /// as the page cache has it, and again as the disk has it. Whether a step was refused.
    pub fn fail(&self, failing: Failing) -> Result<bool, String> {
        let what = format!("{}, {failing:?}", self.fs.name());
        let (disk, mounted) = self.attach()?;
        disk.fail(Some(failing));
        let ended = self.work(&mounted).map_err(|e| format!("{what}: {e}"))?;
        disk.fail(None);
        let exact = match &ended {
            Ended::Whole => true,
            Ended::Refused { not_applied, .. } => *not_applied,
            Ended::Killed => false,
        };
        let answered = acked(&self.acks())?;
        let what = format!("{what}, {} calls failed, {answered} steps answered, {ended:?}", disk.failed());
        // First with the page cache that lived through the failure, unless the file system has given up; then
        // from the disk alone, which must not show less.
        let data = mounted.path().join("data");
        let shown = is_writable(&mounted.path())
            .then(|| self.check(&data, answered, exact).and_then(|_| said(this("look")?.arg(&data))))
            .transpose()
            .map_err(|e| format!("{what}, from the cache: {e}"))?;
        // A file system that failed may complain.
        let unmounted = mounted.unmount();
        if ended == Ended::Whole {
            unmounted.map_err(|e| format!("{what}: {e}"))?;
        }
        let mounted = Mounted::image(&disk.path()).map_err(|e| format!("{what}: {e}"))?;
        let data = mounted.path().join("data");
        let again = match shown {
            None => self.check(&data, answered, exact).map(drop),
            Some(shown) => said(this("look")?.arg(&data)).and_then(|found| {
                if found == shown { Ok(()) } else { Err("what was shown before is gone".to_owned()) }
            }),
        };
        again.map_err(|e| format!("{what}, from the disk: {e}"))?;
        mounted.unmount()?;
        self.forget();
        Ok(ended != Ended::Whole)
    }

    /// Btrfs remembers disks by the id of the file system, which all images share.
    fn forget(&self) {
        if self.fs == Fs::Btrfs
            && let Err(error) = crate::system::run("btrfs", &["device", "scan", "--forget"])
        {
            eprintln!("!! {error}");
        }
    }
}

fn is_writable(dir: &Path) -> bool {
    let probe = dir.join("probe");
    let written = fs::write(&probe, b"probe").and_then(|()| fs::File::open(&probe)?.sync_all());
    written.and_then(|()| fs::remove_file(&probe)).is_ok()
}
