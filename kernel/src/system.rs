//! Programs of the system: running them, mounting with them, and saying what is missing.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Runs a program; its output, or what it said when it failed.
pub fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(arguments).output().map_err(|e| format!("{program}: {e}"))?;
    answer(program, arguments, output)
}

fn answer(program: &str, arguments: &[&str], output: Output) -> Result<String, String> {
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(format!("{program} {}: {}: {said}", arguments.join(" "), output.status))
}

/// This program, as another process.
pub fn this(command: &str) -> Result<Command, String> {
    let mut this = Command::new(std::env::current_exe().map_err(|e| e.to_string())?);
    this.arg(command);
    Ok(this)
}

/// Runs it: the line that it prints, or the error that it is.
pub fn said(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|e| e.to_string())?;
    let line = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if output.status.success() {
        return Ok(line);
    }
    Err(format!("{line} {} {}", output.status, String::from_utf8_lossy(&output.stderr).trim()))
}

/// Whether a program can be found.
pub fn has(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/sbin".into(), "/usr/sbin".into()])
        .any(|dir| dir.join(program).is_file())
}

pub fn is_root() -> bool {
    // SAFETY: the call takes nothing and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// A file system that can be made here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fs {
    Ext4,
    Xfs,
    Btrfs,
}

impl Fs {
    pub const ALL: [Fs; 3] = [Fs::Ext4, Fs::Xfs, Fs::Btrfs];

    pub fn name(self) -> &'static str {
        match self {
            Fs::Ext4 => "ext4",
            Fs::Xfs => "xfs",
            Fs::Btrfs => "btrfs",
        }
    }

    /// The size of a disk for it: XFS makes none below 300 MB.
    pub fn bytes(self, tiny: bool) -> u64 {
        match (self, tiny) {
            (Fs::Ext4, true) => 8 << 20,
            (Fs::Ext4, false) => 48 << 20,
            (Fs::Xfs, _) => 300 << 20,
            (Fs::Btrfs, true) => 16 << 20,
            (Fs::Btrfs, false) => 128 << 20,
        }
    }

    /// Makes it in a new file.
    pub fn make(self, image: &Path, tiny: bool) -> Result<(), String> {
        let file = std::fs::File::create(image).map_err(|e| format!("{}: {e}", image.display()))?;
        file.set_len(self.bytes(tiny)).map_err(|e| format!("{}: {e}", image.display()))?;
        let path = image.to_str().ok_or("a path that is not UTF-8")?;
        match self {
            Fs::Ext4 => run("mkfs.ext4", &["-q", "-F", path]),
            Fs::Xfs => run("mkfs.xfs", &["-q", "-f", path]),
            // Of so few bytes only mixed groups make a file system.
            Fs::Btrfs if tiny => run("mkfs.btrfs", &["-q", "-f", "-M", path]),
            Fs::Btrfs => run("mkfs.btrfs", &["-q", "-f", path]),
        }?;
        Ok(())
    }

    /// Why it cannot be tested here, if so.
    pub fn missing(self) -> Option<String> {
        let maker = format!("mkfs.{}", self.name());
        if !is_root() {
            return Some("mounting takes root".to_owned());
        }
        if !has(&maker) {
            return Some(format!("there is no {maker}"));
        }
        if !Path::new("/dev/loop-control").exists() {
            return Some("there are no loop devices".to_owned());
        }
        // A module may still be loaded by the mount, so only a mount tells.
        let dir = tempfile::tempdir().ok()?;
        let image = dir.path().join("image");
        self.make(&image, true).and_then(|()| Mounted::image(&image)).err()
    }
}

/// A directory on which something is mounted, until it is dropped.
pub struct Mounted {
    dir: tempfile::TempDir,
    // The loop device under it, where it has to be let go by hand.
    device: Option<String>,
}

impl Mounted {
    fn new(arguments: &[&str], device: Option<String>) -> Result<Mounted, String> {
        let dir = tempfile::tempdir().map_err(|e| e.to_string())?;
        let path = dir.path().to_str().ok_or("a path that is not UTF-8")?;
        match run("mount", &[arguments, &[path]].concat()) {
            Ok(_) => Ok(Mounted { dir, device }),
            Err(error) => {
                if let Some(device) = device {
                    run("losetup", &["-d", &device])?;
                }
                Err(error)
            }
        }
    }

    /// The file system in a file, through a loop device that goes with it.
    pub fn image(image: &Path) -> Result<Mounted, String> {
        let path = image.to_str().ok_or("a path that is not UTF-8")?;
        let device = run("losetup", &["-f", "--show", path])?;
        Mounted::new(&[&device], Some(device.clone()))
    }

    /// A file system in memory of so many bytes.
    pub fn tmpfs(bytes: u64) -> Result<Mounted, String> {
        Mounted::new(&["-t", "tmpfs", "-o", &format!("size={bytes}"), "tmpfs"], None)
    }

    /// Where.
    pub fn path(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    /// Unmounts it, and says whether that worked.
    pub fn unmount(mut self) -> Result<(), String> {
        self.let_go()
    }

    fn let_go(&mut self) -> Result<(), String> {
        let path = self.dir.path().to_str().ok_or("a path that is not UTF-8")?;
        if !is_mounted(path) {
            return Ok(());
        }
        let unmounted = run("umount", &[path]);
        if unmounted.is_err() {
            run("umount", &["-l", path])?;
        }
        if let Some(device) = self.device.take() {
            run("losetup", &["-d", &device])?;
            wait_for_loop(&device);
        }
        unmounted.map(drop)
    }
}

/// A loop device is let go by the last who has it open, a moment later.
fn wait_for_loop(device: &str) {
    let backing = format!("/sys/block/{}/loop/backing_file", device.trim_start_matches("/dev/"));
    let start = std::time::Instant::now();
    while Path::new(&backing).exists() && start.elapsed().as_secs() < 10 {
        std::thread::yield_now();
    }
}

fn is_mounted(path: &str) -> bool {
    let mounts = std::fs::read_to_string("/proc/mounts").unwrap_or_default();
    mounts.lines().any(|line| line.split(' ').nth(1) == Some(path))
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(error) = self.let_go() {
            eprintln!("!! {error}");
        }
    }
}
